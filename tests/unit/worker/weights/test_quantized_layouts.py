"""Layouts of AutoAWQ, AutoGPTQ and compressed-tensors are read: as autoawq 0.2.9, auto-gptq 0.7.1 and
compressed-tensors 0.20.0 wrote them.

tests/vectors/quantized_layouts.safetensors has their tensors for a layer of 32 outputs and 64 inputs in groups of 32,
and as `exact` the weights that they make of them again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from control.errors import FurrowError, ModelFilesError
from tests.quantized import FP8_TOKENS, GPTQ, GROUP, TOKENS, compressed, write, write_mxfp4
from worker.models.shard import open_checkpoint
from worker.repository.files import inspect
from worker.weights.quantized_checkpoint import QuantizedCheckpoint
from worker.weights.safetensors_header import read_headers
from worker.weights.schemes import scheme_of
from worker.weights.stored_matrix import StoredMatrix

VECTORS = Path(__file__).parents[3] / "vectors" / "quantized_layouts.safetensors"
FOUR: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    "gptq": GPTQ,
    "w4a16": compressed("pack-quantized", FOUR),
    "w4a16z": compressed("pack-quantized", FOUR | {"symmetric": False}),
    "int8": compressed("int-quantized", {"strategy": "channel"}, TOKENS),
    "fp8": compressed("float-quantized", {"type": "float", "strategy": "channel"}, FP8_TOKENS),
}


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_tensors_of_other_tools_are_read(kind: str, tmp_path: Path) -> None:
    """Whole, and by outputs and inputs that begin inside: the weights are those that the tool reads again."""
    stored = {
        name.partition(".")[2]: tensor for name, tensor in load_file(VECTORS).items() if name.startswith(f"{kind}.")
    }
    exact = stored.pop("exact")
    save_file({f"a.q_proj.{leaf}": tensor for leaf, tensor in stored.items()}, tmp_path / "model.safetensors")
    scheme = scheme_of({"quantization_config": CONFIGS[kind]})
    assert scheme is not None
    with QuantizedCheckpoint(read_headers([tmp_path / "model.safetensors"]), scheme) as checkpoint:
        for dim, part in ((None, slice(None)), (0, slice(8, 24)), (1, slice(32, 64))):
            read_tensor = checkpoint.read("a.q_proj.weight", dim, None if dim is None else [(part.start, part.stop)])
            assert isinstance(read_tensor, StoredMatrix)
            wanted = exact[:, part] if dim == 1 else exact[part]
            assert torch.allclose(
                torch.from_numpy(read_tensor.dequantized(np.float64)).float(), wanted, rtol=1e-6, atol=0
            )


@pytest.mark.parametrize("kind", ["w4a16", "w4a16 with zeros", "w8a8", "fp8 by channel"])
def test_our_writer_s_tensors_are_read_by_compressed_tensors(kind: str, tmp_path: Path) -> None:
    """The package makes the weights of the tests' own checkpoints that Furrow makes."""
    package = pytest.importorskip("compressed_tensors", reason="the package compressed-tensors is not installed")
    from compressed_tensors.compressors import BaseCompressor

    folder, plain = write(tmp_path, kind)
    stored, exact = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    config = inspect(folder).config["quantization_config"]
    [group] = config["config_groups"].values()
    scheme = package.quantization.QuantizationScheme.model_validate(group)
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    module = "model.layers.1.mlp.down_proj"
    state = {name.removeprefix(f"{module}."): one for name, one in stored.items() if name.startswith(f"{module}.")}
    state["weight_scale"] = state["weight_scale"].double()
    theirs = compressor.decompress(state, scheme)["weight"]
    assert torch.allclose(theirs.double(), exact[f"{module}.weight"], rtol=1e-9, atol=0)


def spoilt(folder: Path, kind: str, leaf: str, value: float) -> Path:
    """A checkpoint of which one number of a `leaf` of the second layer is `value`."""
    stored, _ = write(folder, kind)
    tensors = load_file(stored / "model.safetensors")
    tensor = tensors[f"model.layers.1.mlp.up_proj.{leaf}"]
    whole = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
    whole.view(-1)[whole.numel() // 2] = value
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    return stored


@pytest.mark.parametrize(
    ("kind", "leaf", "value", "message"),
    [
        ("fp8 by block", "weight", 0x7F, r"up_proj\.weight holds NaN\. Download"),
        ("fp8 by block", "weight", 0xFF, r"up_proj\.weight holds NaN\. Download"),
        (
            "fp8 by block",
            "weight_scale_inv",
            float("nan"),
            r"up_proj\.weight_scale_inv holds NaN or infinity\. Download",
        ),
        ("w8a8", "weight_scale", float("inf"), r"up_proj\.weight_scale holds NaN or infinity\. Download"),
        ("w4a16", "weight_scale", float("-inf"), r"up_proj\.weight_scale holds NaN or infinity\. Download"),
        ("awq", "scales", float("inf"), r"up_proj\.scales holds NaN or infinity\. Download"),
        ("gptq", "g_idx", 0, r"up_proj\.g_idx: the groups are in the order of activations .*desc_act = false"),
    ],
)
def test_numbers_that_can_not_be_are_refused_at_load(
    kind: str, leaf: str, value: float, message: str, tmp_path: Path
) -> None:
    """NaN among weights, scales that are not finite, and groups in another order than desc_act says: with the tensor
    and the remedy. A layer without them is read."""

    name = "model.layers.1.mlp.up_proj.weight"
    with open_checkpoint(inspect(spoilt(tmp_path / "bad", kind, leaf, value)), dequantize=False) as checkpoint:
        checkpoint.read(name.replace("layers.1", "layers.0"))
        with pytest.raises(FurrowError, match=message):
            checkpoint.read(name)


def test_experts_without_a_scale_are_refused_at_load(tmp_path: Path) -> None:
    """The exponent that stands for NaN, in MXFP4."""

    stored, _ = write_mxfp4(tmp_path)
    tensors = load_file(stored / "model.safetensors")
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 5, 1] = 255
    save_file(tensors, stored / "model.safetensors", {"format": "pt"})
    with open_checkpoint(inspect(stored), dequantize=False) as checkpoint:
        checkpoint.read("model.layers.1.mlp.experts.1.down_proj.weight")
        with pytest.raises(ModelFilesError, match=r"experts\.down_proj_scales holds NaN \(expert 2\)\. Download"):
            checkpoint.read("model.layers.1.mlp.experts.2.down_proj.weight")
