"""Writes tiny quantized checkpoints in the layouts of the formats' tools, each beside a plain one of equal weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import models
from worker.weights.safetensors_header import image_name

SHAPE: dict[str, Any] = {"head_dim": 32, "intermediate_size": 256, "initializer_range": 0.1}
"""Two ranks share whole groups of 32 inputs and blocks of 64."""

BLOCK, GROUP = 64, 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_QUANTIZED = (
    *("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight"),
    *("_coefs.weight", "modality_router.weight"),
)

Written = dict[str, Tensor]
Quantize = Callable[[str, Tensor], tuple[Written, Tensor]]
"""(module, weight) → (the tensors of the layer, its weight by the format's formula in float64)."""


def write(folder: Path, kind: str, family: str = "qwen3", **changes: Any) -> tuple[Path, Path]:
    """(the quantized checkpoint, the plain one in float64 of the weights that its formula gives)."""
    stored, plain = folder / "stored", folder / "plain"
    models.make(family, stored, **(SHAPE | changes))
    models.make(family, plain, **(SHAPE | changes))
    return _rewritten(stored, plain, kind)


def write_with_images(source: Path, folder: Path, kind: str) -> tuple[Path, Path]:
    """As `write`, of the text part of a checkpoint with images; its tower stays as it is."""
    return _rewritten(*(shutil.copytree(source, folder / name) for name in ("stored", "plain")), kind)


def _rewritten(stored: Path, plain: Path, kind: str) -> tuple[Path, Path]:
    config, quantize = KINDS[kind]
    written: Written = {}
    exact: Written = {}
    for name, tensor in load_file(stored / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if name.endswith(_QUANTIZED) and image_name(name) is None:
            pieces, exact[name] = quantize(module, tensor)
            written |= pieces
        else:
            written[name], exact[name] = tensor.bfloat16(), tensor.bfloat16().double()
    save_file({name: one.contiguous() for name, one in written.items()}, stored / "model.safetensors", {"format": "pt"})
    save_file({name: one.contiguous() for name, one in exact.items()}, plain / "model.safetensors", {"format": "pt"})
    change_config(stored, quantization_config=config)
    return stored, plain


MXFP4: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def write_mxfp4(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """gpt_oss with random experts in MXFP4, as it is published, and the plain one of the weights that transformers
    makes of them. Widths of three groups: ranks' shares differ."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored, plain = folder / "stored", folder / "plain"
    shape: dict[str, Any] = {"head_dim": 32, "intermediate_size": 96, "initializer_range": 0.1} | changes
    models.make("gpt_oss", stored, **shape)
    models.make("gpt_oss", plain, **shape)
    generator = torch.Generator().manual_seed(5)
    written: Written = {}
    exact: Written = {}
    for name, tensor in load_file(stored / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            shape_of_blocks = (experts, outputs, inputs // 32, 16)
            blocks = torch.randint(0, 256, shape_of_blocks, dtype=torch.uint8, generator=generator)
            scales = torch.randint(119, 125, shape_of_blocks[:-1], dtype=torch.uint8, generator=generator)
            written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            exact[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float64)
        else:
            written[name], exact[name] = tensor.bfloat16(), tensor.bfloat16().double()
    save_file({name: one.contiguous() for name, one in written.items()}, stored / "model.safetensors", {"format": "pt"})
    save_file({name: one.contiguous() for name, one in exact.items()}, plain / "model.safetensors", {"format": "pt"})
    change_config(stored, quantization_config=MXFP4)
    return stored, plain


def change_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def _float8(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale by block, weights by the formula): the largest of a block becomes 448."""
    blocks = [[block.abs().max() / 448 for block in band.split(columns, 1)] for band in weight.split(rows)]
    scale = torch.tensor(blocks)
    wide = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[:, : weight.shape[1]]
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return codes, scale, codes.double() * wide.double()


def _fp8_block(module: str, weight: Tensor) -> tuple[Written, Tensor]:
    codes, scale, exact = _float8(weight, BLOCK, BLOCK)
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scale}, exact


def _fp8_tensor(module: str, weight: Tensor) -> tuple[Written, Tensor]:
    codes, scale, exact = _float8(weight, *weight.shape)
    return {
        f"{module}.weight": codes,
        f"{module}.weight_scale": scale.reshape(()),
        f"{module}.input_scale": torch.ones(1),
    }, exact


def _fp8_channel(module: str, weight: Tensor) -> tuple[Written, Tensor]:
    codes, scale, _ = _float8(weight, 1, weight.shape[1])
    return {
        f"{module}.weight": codes,
        f"{module}.weight_scale": scale.bfloat16(),
    }, codes.double() * scale.bfloat16().double()


def _int8(module: str, weight: Tensor) -> tuple[Written, Tensor]:
    """-128 occurs, as with llm-compressor: the largest becomes ± 127.5."""
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    codes = (weight / scale).round().clamp(-128, 127)
    return {f"{module}.weight": codes.to(torch.int8), f"{module}.weight_scale": scale}, codes.double() * scale.double()


def _four_bits(weight: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes 0 … 15, zeros, scales of float16, both by group; weights by the formula)."""
    runs = weight.reshape(weight.shape[0], -1, group)
    low, high = runs.amin(2).clamp(max=0), runs.amax(2).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (runs / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    exact = (codes - zeros[..., None]).double() * scales.double()[..., None]
    return codes.reshape(weight.shape).long(), zeros.long(), scales, exact.reshape(weight.shape)


def packed(numbers: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """(rows, columns) of 4 bits → (rows, columns / 8) of int32; `order[k]` lies in the k-th bits from the lowest up."""
    words = torch.zeros(numbers.shape[0], numbers.shape[1] // 8, dtype=torch.long)
    for place, column in enumerate(order):
        words |= numbers[:, column::8] << (4 * place)
    return words.where(words < 2**31, words - 2**32).to(torch.int32)


def _awq(module: str, weight: Tensor) -> tuple[Written, Tensor]:
    codes, zeros, scales, exact = _four_bits(weight)
    return {
        f"{module}.qweight": packed(codes.T, AWQ_ORDER),
        f"{module}.qzeros": packed(zeros.T, AWQ_ORDER),
        f"{module}.scales": scales.T,
    }, exact


def _gptq(module: str, weight: Tensor, offset: int = 1, group: int = GROUP) -> tuple[Written, Tensor]:
    codes, zeros, scales, exact = _four_bits(weight, group)
    return {
        f"{module}.qweight": packed(codes).T,
        f"{module}.qzeros": packed(zeros.T - offset),
        f"{module}.scales": scales.T,
        f"{module}.g_idx": (torch.arange(weight.shape[1]) // group).to(torch.int32),
    }, exact


def _packed_groups(module: str, weight: Tensor, symmetric: bool = True, group: int = GROUP) -> tuple[Written, Tensor]:
    codes, zeros, scales, exact = _four_bits(weight, group)
    if symmetric:
        exact = (codes - 8).double() * scales.double().repeat_interleave(group, 1)
    pieces = {
        f"{module}.weight_packed": packed(codes),
        f"{module}.weight_scale": scales,
        f"{module}.weight_shape": torch.tensor(weight.shape),
    }
    return pieces if symmetric else pieces | {f"{module}.weight_zero_point": packed(zeros.T).T}, exact


def compressed(kind: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    """A quantization_config as llm-compressor writes it."""
    whole = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "group_size": None, "actorder": None}
    group = {
        "targets": ["Linear"],
        "weights": whole | weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "global_compression_ratio": 1.5,
    }


TOKENS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
FP8_TOKENS: dict[str, Any] = TOKENS | {"type": "float"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}

KINDS: dict[str, tuple[dict[str, Any], Quantize]] = {
    "fp8 by block": (
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
        _fp8_block,
    ),
    "fp8 by tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, _fp8_tensor),
    "fp8 by channel": (
        compressed("float-quantized", {"type": "float", "strategy": "channel"}, FP8_TOKENS),
        _fp8_channel,
    ),
    "w8a8": (compressed("int-quantized", {"strategy": "channel"}, TOKENS), _int8),
    "w4a16": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP}),
        _packed_groups,
    ),
    "w4a16 with zeros": (
        compressed("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": GROUP, "symmetric": False}),
        lambda module, weight: _packed_groups(module, weight, symmetric=False),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        _awq,
    ),
    "gptq": (GPTQ, _gptq),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, lambda module, weight: _gptq(module, weight, offset=0)),
    "gptq of whole outputs": (
        GPTQ | {"group_size": -1},
        lambda module, weight: _gptq(module, weight, group=weight.shape[1]),
    ),
}
