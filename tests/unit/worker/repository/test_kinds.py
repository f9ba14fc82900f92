"""Kinds of weights that a rank compiles for: its C++ library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from control.quantization import BLOCK_QUANTS
from worker.native.library import ALL, KINDS, NUMBERS, bits_of
from worker.repository.files import ModelFiles
from worker.repository.kinds import kinds_of
from worker.weights.stored_matrix import Kept

HALF, WHOLE = torch.bfloat16, torch.float32


def files(folder: Path, dtype: torch.dtype, **config: Any) -> ModelFiles:
    path = folder / "model.safetensors"
    save_file({"weight": torch.zeros(2, 2, dtype=dtype)}, path)
    return ModelFiles(config={"model_type": "qwen3", **config}, weights=[path])


@pytest.mark.parametrize(
    ("dtype", "quant", "config", "kinds"),
    [
        (WHOLE, None, {}, set[str]()),
        (HALF, None, {}, {"bfloat16"}),
        (HALF, "int8", {}, {"int8"}),
        (HALF, "int8", {"num_experts_per_tok": 2}, {"int8", "bfloat16"}),
        (WHOLE, "f16", {}, {"float16"}),
        (HALF, "q4k", {}, {"q4_k", "q5_0", "float16", "bfloat16"}),
        (HALF, None, {"quantization_config": {"quant_method": "fp8"}}, {"e4m3", "bfloat16"}),
    ],
)
def test_a_model_has_few_kinds(
    dtype: torch.dtype, quant: str | None, config: dict[str, Any], kinds: set[str], tmp_path: Path
) -> None:
    assert kinds_of(files(tmp_path, dtype, **config), quant) == kinds


def test_each_kind_has_the_number_that_the_library_gives_it() -> None:
    """By the enumeration of layer.h; every `--quant` names known kinds."""
    header = Path(__file__).parents[4] / "worker" / "native" / "source" / "layer.h"
    listed = header.read_text().partition("enum Kind : int32_t {")[2].partition("}")[0]
    names = [line.split("//")[0].strip().rstrip(",").lower() for line in listed.splitlines() if line.strip()]
    assert [name.removesuffix("_blocks").removesuffix("_groups") for name in names] == list(KINDS)
    assert set(BLOCK_QUANTS.values()) < set(KINDS)
    assert bits_of(KINDS) == ALL == 2 ** len(KINDS) - 1
    plain: list[Kept] = ["float32", "bfloat16", "float16", "int8"]
    assert [NUMBERS[kind] for kind in plain] == [0, 1, 2, 3]
