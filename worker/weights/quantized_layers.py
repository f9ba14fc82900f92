"""The tensors of quantized layers: names, types and shapes, from the headers of safetensors files alone; no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.weights.formats import StoredTensor
from worker.weights.safetensors_header import FLOATS
from worker.weights.schemes import E4M3, INT4, INT8, Scheme

FEED_FORWARD = re.compile(r"\.(?:down_proj|c_proj|fc2|w2)$")
"""Layers of whose inputs each rank has a share of the feed-forward width."""

MARKS = {
    "fp8": (".weight_scale_inv", ".weight_scale"),
    "compressed-tensors": (".weight_scale", ".weight_packed"),
    "awq": (".qweight",),
    "gptq": (".qweight",),
}
"""By method, what the name of a quantized layer's tensor ends in."""

STRANGE = {
    ".weight_g_idx": "the groups are in the order of activations (actorder)",
    ".bitmask": "the weights are sparse",
    ".compressed": "the weights are sparse",
    ".weight_global_scale": "the weights are NVFP4",
    ".SCB": "the weights are those of bitsandbytes",
    ".absmax": "the weights are those of bitsandbytes",
}


def layers(scheme: Scheme, headers: Mapping[str, StoredTensor]) -> dict[str, QuantizedLinear]:
    """The quantized linear layers by their modules' names."""
    for name, header in headers.items():
        for end, why in STRANGE.items():
            if name.endswith(end):
                raise UnsupportedArchitecture(f"{header.path} holds {name}: {why}, which is not supported.")
    marks = MARKS[scheme.method]
    modules = sorted({name.removesuffix(mark) for name in headers for mark in marks if name.endswith(mark)})
    if not modules:
        raise ModelFilesError(
            f"config.json says that the weights are quantized ({scheme.method}), but no tensor's name ends in "
            f"{' or '.join(marks)}. Remove quantization_config, or download the checkpoint again."
        )
    read = READERS[scheme.method]
    linears = {module: read(_Tensors(headers, module), scheme) for module in modules}
    for module, linear in linears.items():
        if module.rpartition(".")[2] in ("lm_head", "embed_tokens", "wte"):
            raise UnsupportedArchitecture(
                f"{headers[linear.weight].path} holds {linear.weight}: a quantized vocabulary is not supported. "
                "Use a checkpoint that leaves lm_head and embeddings as they are."
            )
        if linear.kind not in scheme.kinds:
            raise ModelFilesError(
                f"{headers[linear.weight].path} holds {linear.weight} as {linear.kind}, which config.json's "
                f"quantization_config does not name ({', '.join(sorted(scheme.kinds))})."
            )
    return linears


@dataclass(frozen=True)
class QuantizedLinear:
    """The stored weight of one linear layer. `group` inputs share a scale, in `rows` outputs; `scale` and `zeros` are
    tensors' names, `zeros` None where there are none."""

    kind: str
    weight: str
    scale: str
    zeros: str | None
    outputs: int
    inputs: int
    group: int
    rows: int = 1

    @property
    def unit(self) -> int:
        """Neighbouring inputs that stay on one rank: a group, or without groups eight inputs of four bits, which one
        number holds in most schemes."""
        if self.group < self.inputs:
            return self.group
        return 8 if self.kind == INT4 else 1


def borders(linears: dict[str, QuantizedLinear]) -> tuple[int, ...]:
    """The inputs of feed-forward layers that stay together, at whose multiples the ranks' shares end; the largest
    first."""
    units = {linear.unit for module, linear in linears.items() if FEED_FORWARD.search(module) and linear.unit > 1}
    return tuple(sorted(units, reverse=True))


class _Tensors:
    """The tensors of one layer."""

    def __init__(self, headers: Mapping[str, StoredTensor], module: str) -> None:
        self._headers = headers
        self._module = module

    def has(self, leaf: str) -> bool:
        return self.name(leaf) in self._headers

    def name(self, leaf: str) -> str:
        return f"{self._module}.{leaf}"

    def matrix(self, leaf: str, dtypes: set[str]) -> tuple[int, int]:
        """The sizes of a tensor of two dimensions."""
        header = self.get(leaf, dtypes)
        if len(header.shape) != 2 or min(header.shape) < 1:
            raise self.wrong(leaf, "a matrix")
        return header.shape[0], header.shape[1]

    def get(self, leaf: str, dtypes: set[str]) -> StoredTensor:
        name = self.name(leaf)
        if name not in self._headers:
            raise ModelFilesError(
                f"The weights have no tensor {name}, which the quantized layer {self._module} needs. "
                "Download the checkpoint again."
            )
        header = self._headers[name]
        if header.type.name not in dtypes:
            raise ModelFilesError(
                f"{header.path} holds {name} as {header.type.name}, which is not supported; needed is "
                f"{' or '.join(sorted(dtypes))}."
            )
        return header

    def expect(self, leaf: str, dtypes: set[str], shape: tuple[int, ...]) -> str:
        """The name of a tensor that has `shape`."""
        if self.get(leaf, dtypes).shape != shape:
            raise self.wrong(leaf, f"{list(shape)}")
        return self.name(leaf)

    def wrong(self, leaf: str, needed: str) -> ModelFilesError:
        name = self.name(leaf)
        header = self._headers[name]
        return ModelFilesError(f"{header.path} holds {name} of shape {list(header.shape)}; needed is {needed}.")


def _eight_bits(tensors: _Tensors, scheme: Scheme) -> QuantizedLinear:
    """`weight` (outputs, inputs) with `weight_scale` or `weight_scale_inv`: one number, one by output, or by block."""
    kind = INT8 if tensors.get("weight", {"I8", "F8_E4M3"}).type.name == "I8" else E4M3
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
