"""Experts in MXFP4: the checks of their configuration and headers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from control.errors import ModelFilesError, UnsupportedArchitecture
from tests.quantized import GPTQ, MXFP4
from tests.unit.worker.repository.test_quantization import written
from tests.unit.worker.repository.test_validation import LLAMA
from worker.repository import quantized, validation

MIXTURE: dict[str, Any] = LLAMA | {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
}
EXPERTS: dict[str, tuple[str, list[int]]] = {
    "model.layers.0.mlp.experts.gate_up_proj_blocks": ("U8", [4, 192, 2, 16]),
    "model.layers.0.mlp.experts.gate_up_proj_scales": ("U8", [4, 192, 2]),
    "model.layers.0.mlp.experts.down_proj_blocks": ("U8", [4, 64, 3, 16]),
    "model.layers.0.mlp.experts.down_proj_scales": ("U8", [4, 64, 3]),
}


def test_only_gpt_oss_is_served_in_mxfp4() -> None:
    """gpt_oss in another format is refused, and so is another type in mxfp4."""
    validation.check(MIXTURE | {"quantization_config": MXFP4}, 2)
    with pytest.raises(UnsupportedArchitecture, match=r"'gpt_oss' quantized as gptq.*or the one in mxfp4"):
        validation.check(MIXTURE | {"quantization_config": GPTQ}, 1)
    with pytest.raises(UnsupportedArchitecture, match=r"'llama' quantized as mxfp4.*Use the unquantized checkpoint\."):
        validation.check(LLAMA | {"quantization_config": MXFP4}, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"down_proj_scales": None}, r"no tensor model\.layers\.0\.mlp\.experts\.down_proj_scales"),
        ({"down_proj_blocks": ("U8", [4, 64, 2, 16])}, r"down_proj_blocks is U8 of shape \[4, 64, 2, 16\]; by config"),
        ({"gate_up_proj_blocks": ("I8", [4, 192, 2, 16])}, "gate_up_proj_blocks is I8"),
    ],
)
def test_experts_in_mxfp4_that_do_not_fit(
    changes: dict[str, tuple[str, list[int]] | None], message: str, tmp_path: Path
) -> None:
    config = MIXTURE | {"quantization_config": MXFP4}
    quantized.check(config, written(tmp_path, EXPERTS), 3, ["cpu"])
    with pytest.raises(UnsupportedArchitecture, match=r"intermediate_size = 96 has 3 groups of 32, which 4 .*--tp 3"):
        quantized.check(config, written(tmp_path, EXPERTS), 4, ["cpu"])
    stem = "model.layers.0.mlp.experts."
    entries = EXPERTS | {stem + name: entry for name, entry in changes.items()}  # type: ignore[dict-item]
    kept = {name: entry for name, entry in entries.items() if entry is not None}
    with pytest.raises(ModelFilesError, match=message):
        quantized.check(config, written(tmp_path, kept), 1, ["cpu"])
