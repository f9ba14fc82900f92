"""The tensors of quantized layers: names, types and shapes, from the headers of safetensors files alone."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.errors import ModelFilesError, SettingsError, UnsupportedArchitecture
from worker.families.registry import FAMILIES
from worker.repository.multimodal.text_part import text_name
from worker.repository.quantization import mxfp4, shares
from worker.repository.quantization.linear import QuantizedLinear
from worker.repository.quantization.scheme import E4M3, INT4, INT8, Scheme, scheme_of

FLOATS = {"F16", "BF16", "F32"}
MARKS = {
    "fp8": (".weight_scale_inv", ".weight_scale"),
    "compressed-tensors": (".weight_scale", ".weight_packed"),
    "awq": (".qweight",),
    "gptq": (".qweight",),
}
"""By method, what the name of a quantized layer's tensor ends in."""

TOGETHER = re.compile(r"\.experts\.(?:gate_up|down)_proj")
"""The names of tensors that hold all experts of a layer."""

STRANGE = {
    ".weight_g_idx": "the groups are in the order of activations (actorder)",
    ".bitmask": "the weights are sparse",
    ".compressed": "the weights are sparse",
    ".weight_global_scale": "the weights are NVFP4",
    ".SCB": "the weights are those of bitsandbytes",
    ".absmax": "the weights are those of bitsandbytes",
}


@dataclass(frozen=True)
class Header:
    """One tensor: its type as safetensors names it, its shape, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


Headers = dict[str, Header]


def headers_of(files: list[Path], named: Callable[[str], str | None] = text_name) -> Headers:
    """The tensors of the text part by their names there, or those that `named` gives a name. Raises ModelFilesError
    naming a file that is no such file."""
    found: Headers = {}
    for path in files:
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > path.stat().st_size:
                    raise ValueError(f"its header should have {length} bytes")
                entries: dict[str, Any] = json.loads(file.read(length))
            for stored, entry in entries.items():
                name = named(stored)
                if stored != "__metadata__" and name is not None:
                    found[name] = Header(str(entry["dtype"]), tuple(int(one) for one in entry["shape"]), path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise ModelFilesError(f"{path} is not a safetensors file: {error}. Download it again.") from error
    return found


def check(config: dict[str, Any], files: list[Path], tp: int, devices: Sequence[str]) -> None:
    """Raise ModelFilesError or UnsupportedArchitecture naming the tensor of a quantized checkpoint that is missing,
    does not fit config.json, or can't be shared by `tp` ranks; SettingsError for a device that is no CPU."""
    scheme = scheme_of(config)
    if scheme is None:
        return
    for device in devices:
        if not device.startswith("cpu"):
            raise SettingsError(
                f"Quantized checkpoints ({scheme.method}) are for CPUs, not for {device}: use --devices cpu, or the "
                "unquantized checkpoint"
            )
    headers = headers_of(files)
    if scheme.method == "mxfp4":
        mxfp4.check(config, headers, tp)
        return
    if together := next((name for name in headers if TOGETHER.search(name)), None):
        raise UnsupportedArchitecture(
            f"{headers[together].file} holds {together}: experts of a layer in one tensor are not supported in a "
            f"checkpoint that is quantized ({scheme.method}). Use one with a tensor for each expert."
        )
    found = layers(scheme, headers)
    ends = shares.borders(found)
    for module, linear in found.items():
        expected = _sizes(config, module).get(module.rpartition(".")[2], (linear.outputs, linear.inputs))
        if (linear.outputs, linear.inputs) != expected:
            raise ModelFilesError(
                f"{linear.weight} has {linear.outputs} outputs of {linear.inputs} inputs; config.json says "
                f"{expected[0]} of {expected[1]}. Is this the checkpoint of its config?"
            )
        shares.check(module, linear, ends, tp)


def _sizes(config: dict[str, Any], module: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) by name of the layers that most families have; of experts if `module` is one's."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if not isinstance(hidden, int) or not isinstance(heads, int) or not heads:
        return {}
    head = config.get("head_dim") or hidden // heads
    family = FAMILIES.get(str(config.get("model_type")))
    gated = 2 if family is not None and family.output_gate else 1
    sizes = {"q_proj": (gated * heads * head, hidden), "o_proj": (hidden, heads * head)}
    if ".shared_expert" in module:
        return sizes
    own = config.get("moe_intermediate_size") if ".experts." in module else None
    inner = own or (config.get("intermediate_size") if family is None else family.feed_forward_width(config))
    if isinstance(inner, int):
        sizes |= dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (inner, hidden))
        sizes |= dict.fromkeys(("down_proj", "w2"), (hidden, inner))
    if isinstance(shared := config.get("num_key_value_heads"), int):
        sizes |= dict.fromkeys(("k_proj", "v_proj"), (shared * head, hidden))
    return sizes


def layers(scheme: Scheme, headers: Headers) -> dict[str, QuantizedLinear]:
    """The quantized linear layers by their modules' names."""
    for name, header in headers.items():
        for end, why in STRANGE.items():
            if name.endswith(end):
                raise UnsupportedArchitecture(f"{header.file} holds {name}: {why}, which is not supported.")
    marks = MARKS[scheme.method]
    modules = sorted({name.removesuffix(mark) for name in headers for mark in marks if name.endswith(mark)})
    if not modules:
        raise ModelFilesError(
            f"config.json says that the weights are quantized ({scheme.method}), but no tensor's name ends in "
            f"{' or '.join(marks)}. Remove quantization_config, or download the checkpoint again."
        )
    read = READERS[scheme.method]
    found = {module: read(_Tensors(headers, module), scheme) for module in modules}
    for module, linear in found.items():
        if module.rpartition(".")[2] in ("lm_head", "embed_tokens", "wte"):
            raise UnsupportedArchitecture(
                f"{headers[linear.weight].file} holds {linear.weight}: a quantized vocabulary is not supported. "
                "Use a checkpoint that leaves lm_head and embeddings as they are."
            )
        if linear.kind not in scheme.kinds:
            raise ModelFilesError(
                f"{headers[linear.weight].file} holds {linear.weight} as {linear.kind}, which config.json's "
                f"quantization_config does not name ({', '.join(sorted(scheme.kinds))})."
            )
    return found


class _Tensors:
    """The tensors of one layer."""

    def __init__(self, headers: Headers, module: str) -> None:
        self._headers, self._module = headers, module

    def has(self, leaf: str) -> bool:
        return f"{self._module}.{leaf}" in self._headers

    def name(self, leaf: str) -> str:
        return f"{self._module}.{leaf}"

    def matrix(self, leaf: str, dtypes: set[str]) -> tuple[int, int]:
        """The sizes of a tensor of two dimensions."""
        header = self.get(leaf, dtypes)
        if len(header.shape) != 2 or min(header.shape) < 1:
            raise self.wrong(leaf, "a matrix")
        return header.shape[0], header.shape[1]

    def get(self, leaf: str, dtypes: set[str]) -> Header:
        name = f"{self._module}.{leaf}"
        if name not in self._headers:
            raise ModelFilesError(
                f"The weights have no tensor {name}, which the quantized layer {self._module} needs. "
                "Download the checkpoint again."
            )
        header = self._headers[name]
        if header.dtype not in dtypes:
            raise ModelFilesError(
                f"{header.file} holds {name} as {header.dtype}, which is not supported; needed is "
                f"{' or '.join(sorted(dtypes))}."
            )
        return header

    def expect(self, leaf: str, dtypes: set[str], shape: tuple[int, ...]) -> str:
        """The name of a tensor that has `shape`."""
        if self.get(leaf, dtypes).shape != shape:
            raise self.wrong(leaf, f"{list(shape)}")
        return f"{self._module}.{leaf}"

    def wrong(self, leaf: str, needed: str) -> ModelFilesError:
        name = f"{self._module}.{leaf}"
        header = self._headers[name]
        return ModelFilesError(f"{header.file} holds {name} of shape {list(header.shape)}; needed is {needed}.")


def _eight_bits(tensors: _Tensors, scheme: Scheme) -> QuantizedLinear:
    """`weight` (outputs, inputs) with `weight_scale` or `weight_scale_inv`: one number, one by output, or by block."""
    kind = INT8 if tensors.get("weight", {"I8", "F8_E4M3"}).dtype == "I8" else E4M3
    outputs, inputs = tensors.matrix("weight", {"I8", "F8_E4M3"})
    leaf = "weight_scale_inv" if tensors.has("weight_scale_inv") else "weight_scale"
    scale = tensors.get(leaf, FLOATS).shape
    if tensors.has("weight_zero_point"):
        raise UnsupportedArchitecture(
            f"{tensors.name('weight_zero_point')}: 8 bits with zero points are not supported."
        )
    linear = QuantizedLinear(kind, tensors.name("weight"), tensors.name(leaf), None, outputs, inputs, inputs, 1)
    if scale in ((outputs,), (outputs, 1)):
        return linear
    if scale in ((), (1,), (1, 1)) and (
        scheme.block is None or (outputs <= scheme.block[0] and inputs <= scheme.block[1])
    ):
        return QuantizedLinear(kind, linear.weight, linear.scale, None, outputs, inputs, inputs, outputs)
    if kind == INT8 or len(scale) != 2 or min(scale) < 1:
        raise tensors.wrong(leaf, f"one number, or {[outputs, 1]}")
    rows, group = scheme.block or (128, 128)
    if scale != (-(-outputs // rows), -(-inputs // group)):
        raise tensors.wrong(leaf, f"{[-(-outputs // rows), -(-inputs // group)]}, by block of {rows} x {group}")
    return QuantizedLinear(kind, linear.weight, linear.scale, None, outputs, inputs, group, rows)


def _compressed(tensors: _Tensors, scheme: Scheme) -> QuantizedLinear:
    if not tensors.has("weight_packed"):
        return _eight_bits(tensors, scheme)
    outputs, words = tensors.matrix("weight_packed", {"I32"})
    inputs = 8 * words
    rows, groups = tensors.matrix("weight_scale", FLOATS)
    if rows != outputs or inputs % groups or (inputs // groups) % 8:
        raise tensors.wrong("weight_scale", f"{outputs} outputs by groups of a multiple of 8 of {inputs} inputs")
    zeros = None
    if tensors.has("weight_zero_point"):
        zeros = tensors.expect("weight_zero_point", {"I32"}, (-(-outputs // 8), groups))
    return QuantizedLinear(
        INT4, tensors.name("weight_packed"), tensors.name("weight_scale"), zeros, outputs, inputs, inputs // groups
    )


def _awq(tensors: _Tensors, scheme: Scheme) -> QuantizedLinear:
    inputs, words = tensors.matrix("qweight", {"I32"})
    return _by_inputs(tensors, scheme, inputs, 8 * words)


def _gptq(tensors: _Tensors, scheme: Scheme) -> QuantizedLinear:
    words, outputs = tensors.matrix("qweight", {"I32"})
    if tensors.has("g_idx"):
        tensors.expect("g_idx", {"I32", "I64"}, (8 * words,))
    return _by_inputs(tensors, scheme, 8 * words, outputs)


def _by_inputs(tensors: _Tensors, scheme: Scheme, inputs: int, outputs: int) -> QuantizedLinear:
    """Scales (groups, outputs) and zero points, eight outputs in a number."""
    group = inputs if scheme.group in (None, -1) else scheme.group or inputs
    if inputs % group or group % 8 or outputs % 8:
        raise ModelFilesError(
            f"{tensors.name('qweight')}: {outputs} x {inputs} weights can't be packed by eight in groups of {group}. "
            "Is this the checkpoint of its config?"
        )
    tensors.expect("scales", FLOATS, (inputs // group, outputs))
    zeros = tensors.expect("qzeros", {"I32"}, (inputs // group, outputs // 8))
    return QuantizedLinear(INT4, tensors.name("qweight"), tensors.name("scales"), zeros, outputs, inputs, group)


READERS: dict[str, Callable[[_Tensors, Scheme], QuantizedLinear]] = {
    "fp8": _eight_bits,
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
}
