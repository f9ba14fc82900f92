"""The format of a quantized checkpoint, from config.json's quantization_config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from control.errors import UnsupportedArchitecture
from worker.repository.quantization import compressed_tensors, mxfp4
from worker.repository.quantization.fields import Fields

SERVED = "fp8, compressed-tensors (W8A8, W4A16, FP8), awq and gptq of 4 bits, mxfp4 (gpt_oss)"

E4M3, INT8, INT4, E2M1 = "e4m3", "int8", "int4", "e2m1"
"""Kinds of stored weights: 8-bit floats, whole numbers of 8 and 4 bits, and 4-bit floats."""


@dataclass(frozen=True)
class Scheme:
    """A checkpoint's format. `method` is its quant_method, `kinds` are the kinds of weights that it may hold.

    `block` (outputs, inputs) share a scale in fp8 checkpoints; None: a scale by tensor or output. `group` inputs share
    a scale in checkpoints of 4 bits; -1: all inputs; None: the tensors' shapes say it. `zero_offset` is added to stored
    zero points.
    """

    method: str
    kinds: frozenset[str]
    block: tuple[int, int] | None = None
    group: int | None = None
    zero_offset: int = 0


def scheme_of(config: dict[str, Any]) -> Scheme | None:
    """The format of the checkpoint with this config.json; None for plain weights. Raises UnsupportedArchitecture naming
    field and value of what is not served, ModelFilesError for a value that is none."""
    given = config.get("quantization_config") or config.get("compression_config")
    if not given:
        return None
    fields = Fields(given, "quantization_config")
    method = fields.text("quant_method", "")
    if method not in PARSERS:
        named = _bits_and_bytes(fields) if method == "bitsandbytes" else repr(method)
        raise UnsupportedArchitecture(
            f"The checkpoint is quantized: quantization_config.quant_method is {named}, which is not supported. "
            f"Served are {SERVED}; else use the unquantized checkpoint."
        )
    return PARSERS[method](fields)


def _fp8(fields: Fields) -> Scheme:
    """DeepSeek's and Qwen3's block-wise FP8, and scales by tensor or output (transformers' FineGrainedFP8Config)."""
    fields.one_of("fmt", (None, "e4m3"))
    fields.one_of("scale_fmt", (None, "float"))
    fields.one_of("activation_scheme", (None, "dynamic", "static"))
    block = fields.value("weight_block_size")
    return Scheme("fp8", frozenset({E4M3}), block=None if block is None else fields.sizes("weight_block_size", 2))


def _compressed(fields: Fields) -> Scheme:
    return Scheme("compressed-tensors", compressed_tensors.kinds(fields))


def _awq(fields: Fields) -> Scheme:
    """AutoAWQ's layout `gemm`."""
    fields.one_of("bits" if fields.has("bits") else "w_bit", (4,))
    fields.one_of("version" if fields.has("version") else "format", (None, "gemm", "GEMM"))
    fields.one_of("zero_point", (None, True))
    return Scheme(
        "awq", frozenset({INT4}), group=fields.group("group_size" if fields.has("group_size") else "q_group_size")
    )


def _gptq(fields: Fields) -> Scheme:
    """AutoGPTQ's layout, whose zero points are stored less one, and GPTQModel's `gptq_v2`, where they are not."""
    fields.one_of("bits", (4,))
    fields.one_of("desc_act", (None, False), "Checkpoints in the order of activations are not supported")
    fields.one_of("is_marlin_format", (None, False))
    fields.one_of("pack_dtype", (None, "int32"))
    fields.one_of("lm_head", (None, False))
    fields.empty("dynamic")
    name = "checkpoint_format" if fields.has("checkpoint_format") else "format"
    layout = fields.one_of(name, (None, "gptq", "gptq_v2"))
    return Scheme("gptq", frozenset({INT4}), group=fields.group("group_size"), zero_offset=int(layout != "gptq_v2"))


def _mxfp4(fields: Fields) -> Scheme:
    """gpt_oss as it is published; `modules_to_not_convert` names what the tensors show."""
    return Scheme("mxfp4", frozenset({E2M1}), group=mxfp4.GROUP)


def _bits_and_bytes(fields: Fields) -> str:
    return f"'bitsandbytes' of {4 if fields.value('load_in_4bit') else 8} bits"


PARSERS: dict[str, Callable[[Fields], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
