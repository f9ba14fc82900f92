"""The schemes of compressed-tensors (github.com/vllm-project/compressed-tensors, quantization/quant_args.py)."""

from __future__ import annotations

from control.errors import UnsupportedArchitecture
from worker.repository.quantization.fields import REMEDY, Fields

FORMATS = {
    "pack-quantized": "int4",
    "int-quantized": "int8",
    "float-quantized": "e4m3",
    "naive-quantized": None,
    "mixed-precision": None,
}
"""The kind of weights of a format; None: by the group."""


def kinds(fields: Fields) -> frozenset[str]:
    """The kinds of weights of a quantization_config. A layer's tensors say which kind it is in. Keys and values are
    cached as floats, with and without a kv_cache_scheme. Raises UnsupportedArchitecture for what is not served, as
    sparsity, other bits and groups in the order of activations, and ModelFilesError for a value of another type."""
    fields.one_of("quantization_status", (None, "compressed"))
    fields.empty("transform_config")
    if fields.value("sparsity_config"):
        fields.object("sparsity_config").one_of("format", (None, "dense"), "Sparse weights are not supported")
    named = fields.one_of("format", (None, *FORMATS))
    return frozenset(_kind(group, named) for group in fields.objects("config_groups"))


def _kind(group: Fields, named: str | None) -> str:
    weights = group.object("weights")
    group.empty("output_activations")
    own = group.one_of("format", (None, *FORMATS)) or named
    bits = weights.one_of("num_bits", (4, 8))
    numbers = (None, "int") if bits == 4 else (None, "int", "float")
    kind = "int4" if bits == 4 else "e4m3" if weights.one_of("type", numbers) == "float" else "int8"
    weights.one_of("type", numbers)
    if own is not None and FORMATS[own] not in (None, kind):
        raise UnsupportedArchitecture(
            f"config.json has {weights.path} of {bits} bits in the format '{own}', which is not supported. {REMEDY}"
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
    given = group.object("input_activations")
    given.one_of("num_bits", (8,))
    if kind == "e4m3":
        given.one_of("type", ("float",))
        return None
    given.one_of("type", (None, "int"))
    given.one_of("symmetric", (None, True))
    given.one_of("strategy", ("token",))
    given.one_of("dynamic", (True,), "Activations with a fixed scale are not supported")
    return None
