"""Formats of quantized checkpoints, from config.json's quantization_config; no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.families.fields import is_whole

REMEDY = "Use the unquantized checkpoint, or one in another format."
LARGEST = 2**24
"""No size of a group or block is above it."""


class Fields:
    """The object at `path` of config.json. A field that is null is one that is missing."""

    def __init__(self, value: object, path: str) -> None:
        """Raises ModelFilesError if `value` is no object."""
        if not isinstance(value, dict):
            raise ModelFilesError(f"config.json: {path} must be an object, not {_shown(value)}.")
        self._values = cast(dict[str, Any], value)
        self.path = path

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def value(self, name: str) -> Any:
        return self._values.get(name)

    def text(self, name: str, default: str) -> str:
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value or default

    def one_of(self, name: str, allowed: tuple[object, ...], why: str = "") -> Any:
        """The field's value; UnsupportedArchitecture if it is none of `allowed`, compared with its type."""
        value = self._values.get(name)
        if not any(value is option or (type(value) is type(option) and value == option) for option in allowed):
            served = ", ".join(_shown(option) for option in allowed if option is not None) or "nothing"
            raise UnsupportedArchitecture(
                f"config.json has {self.path}.{name} = {_shown(value)}, which is not supported (served: {served}). "
                f"{f'{why}. ' if why else ''}{REMEDY}"
            )
        return value

    def empty(self, name: str) -> None:
        """Raises UnsupportedArchitecture for anything but null, {} and []."""
        if self._values.get(name):
            raise UnsupportedArchitecture(
                f"config.json has {self.path}.{name} = {_shown(self._values[name])}, which is not supported. {REMEDY}"
            )

    def sizes(self, name: str, count: int) -> Any:
        """A tuple of `count` positive whole numbers."""
        value = self._values.get(name)
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(is_whole(number, most=LARGEST) for number in value)
        ):
            raise self._wrong(name, f"{count} positive whole numbers")
        return tuple(value)

    def group(self, name: str) -> int:
        """The inputs that share a scale: a multiple of 8, or -1 for all inputs."""
        value: Any = self._values.get(name)
        if type(value) is int and (value == -1 or (0 < value <= LARGEST and value % 8 == 0)):
            return value
        raise self._wrong(name, "a positive multiple of 8, or -1")

    def object(self, name: str) -> Fields:
        return Fields(self._values.get(name), f"{self.path}.{name}")

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of the object `name`, at least one."""
        value = self._values.get(name)
        if not isinstance(value, dict) or not value:
            raise self._wrong(name, "an object with at least one group")
        for key, entry in value.items():
            yield Fields(entry, f"{self.path}.{name}.{key}")

    def _wrong(self, name: str, needed: str) -> ModelFilesError:
        return ModelFilesError(
            f"config.json has {self.path}.{name} = {_shown(self._values.get(name))}; needed is {needed}."
        )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


FORMATS = {
    "pack-quantized": "int4",
    "int-quantized": "int8",
    "float-quantized": "e4m3",
    "naive-quantized": None,
    "mixed-precision": None,
}
"""The kind of weights of a format; None: by the group."""


def _compressed_kinds(fields: Fields) -> frozenset[str]:
    """The kinds of weights of a quantization_config. A layer's tensors say which kind it is in. Keys and values are
    cached as floats, with and without a kv_cache_scheme. Raises UnsupportedArchitecture for what is not served, as
    sparsity, other bits and groups in the order of activations, and ModelFilesError for a value of another type."""
    fields.one_of("quantization_status", (None, "compressed"))
    fields.empty("transform_config")
    if fields.value("sparsity_config"):
        fields.object("sparsity_config").one_of("format", (None, "dense"), "Sparse weights are not supported")
    format_name = fields.one_of("format", (None, *FORMATS))
    return frozenset(_kind(group, format_name) for group in fields.objects("config_groups"))


def _kind(group: Fields, default: str | None) -> str:
    weights = group.object("weights")
    group.empty("output_activations")
    name = group.one_of("format", (None, *FORMATS)) or default
    bits = weights.one_of("num_bits", (4, 8))
    numbers = (None, "int") if bits == 4 else (None, "int", "float")
    kind = "int4" if bits == 4 else "e4m3" if weights.one_of("type", numbers) == "float" else "int8"
    weights.one_of("type", numbers)
    if name is not None and FORMATS[name] not in (None, kind):
        raise UnsupportedArchitecture(
            f"config.json has {weights.path} of {bits} bits in the format '{name}', which is not supported. {REMEDY}"
        )
    weights.one_of("dynamic", (None, False))
    _weights(weights, kind)
    _activations(group, kind)
    return kind


def _weights(weights: Fields, kind: str) -> None:
    weights.one_of(
        "actorder", (None, False, "weight", "static"), "Groups in the order of activations are not supported"
    )
    if kind == "int4":
        if weights.one_of("strategy", (None, "group", "channel")) != "channel":
            weights.group("group_size")
        return
    weights.one_of("symmetric", (None, True))
    strategies = ("tensor", "channel", "block") if kind == "e4m3" else ("tensor", "channel")
    if weights.one_of("strategy", (None, *strategies)) == "block":
        weights.one_of("block_structure", ([128, 128],))


def _activations(group: Fields, kind: str) -> None:
    """Of whole 8-bit weights the activations are 8 bits too, with a scale by token. Weights of 4 bits and FP8 meet
    activations as they are."""
    if kind == "int4":
        return group.empty("input_activations")
    if kind == "e4m3" and not group.has("input_activations"):
        return None
    activations = group.object("input_activations")
    activations.one_of("num_bits", (8,))
    if kind == "e4m3":
        activations.one_of("type", ("float",))
        return None
    activations.one_of("type", (None, "int"))
    activations.one_of("symmetric", (None, True))
    activations.one_of("strategy", ("token",))
    activations.one_of("dynamic", (True,), "Activations with a fixed scale are not supported")
    return None


SERVED = "fp8, compressed-tensors (W8A8, W4A16, FP8), awq and gptq of 4 bits, mxfp4 (gpt_oss)"

MXFP4_GROUP = 32
"""Inputs that share a scale in MXFP4 (OCP Microscaling Formats 1.0)."""

# Kinds of stored weights: 8-bit floats, whole numbers of 8 and 4 bits, and 4-bit floats.
E4M3 = "e4m3"
INT8 = "int8"
INT4 = "int4"
E2M1 = "e2m1"


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
    described = config.get("quantization_config") or config.get("compression_config")
    if not described:
        return None
    fields = Fields(described, "quantization_config")
    method = fields.text("quant_method", "")
    if method not in PARSERS:
        method_name = _bits_and_bytes(fields) if method == "bitsandbytes" else repr(method)
        raise UnsupportedArchitecture(
            f"The checkpoint is quantized: quantization_config.quant_method is {method_name}, which is not supported. "
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
    return Scheme("compressed-tensors", _compressed_kinds(fields))


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
    return Scheme("mxfp4", frozenset({E2M1}), group=MXFP4_GROUP)


def _bits_and_bytes(fields: Fields) -> str:
    return f"'bitsandbytes' of {4 if fields.value('load_in_4bit') else 8} bits"


PARSERS: dict[str, Callable[[Fields], Scheme]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
}
