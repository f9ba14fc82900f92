"""Decides from config.json and the headers of its files whether a quantized checkpoint can be served and shared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from control.errors import ModelFilesError, SettingsError, UnsupportedArchitecture
from worker.families.registry import FAMILIES
from worker.repository.config_fields import number
from worker.weights.formats import StoredTensor
from worker.weights.quantized_layers import FEED_FORWARD, QuantizedLinear, borders, layers
from worker.weights.safetensors_header import text_tensors
from worker.weights.schemes import MXFP4_GROUP, scheme_of
from worker.weights.sharding import ends_at

TOGETHER = re.compile(r"\.experts\.(?:gate_up|down)_proj")
"""The names of tensors that hold all experts of a layer."""
ATTENTION = re.compile(r"\.(?:o_proj|dense|out_proj)$")
"""Layers of whose inputs each rank has a share."""


def check(config: dict[str, Any], tensors: Mapping[str, StoredTensor], tp: int, devices: Sequence[str]) -> None:
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
    text = text_tensors(tensors)
    if scheme.method == "mxfp4":
        _check_mxfp4(config, text, tp)
        return
    if together := next((name for name in text if TOGETHER.search(name)), None):
        raise UnsupportedArchitecture(
            f"{text[together].path} holds {together}: experts of a layer in one tensor are not supported in a "
            f"checkpoint that is quantized ({scheme.method}). Use one with a tensor for each expert."
        )
    linears = layers(scheme, text)
    ends = borders(linears)
    for module, linear in linears.items():
        expected = _sizes(config, module).get(module.rpartition(".")[2], (linear.outputs, linear.inputs))
        if (linear.outputs, linear.inputs) != expected:
            raise ModelFilesError(
                f"{linear.weight} has {linear.outputs} outputs of {linear.inputs} inputs; config.json says "
                f"{expected[0]} of {expected[1]}. Is this the checkpoint of its config?"
            )
        _check_share(module, linear, ends, tp)


def _sizes(config: dict[str, Any], module: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) by name of the layers that most families have; of experts if `module` is one's."""
    hidden = config.get("hidden_size")
    heads = config.get("num_attention_heads")
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


def _check_share(module: str, linear: QuantizedLinear, ends: tuple[int, ...], tp: int) -> None:
    """Raise UnsupportedArchitecture unless `tp` ranks have whole groups of the layer's inputs."""
    if tp == 1 or linear.group == linear.inputs:
        return
    if FEED_FORWARD.search(module) is None:
        if ATTENTION.search(module) is None:
            return
        ends = ()  # heads are shared evenly
    if not _shared(linear, ends, tp):
        fitting = [str(one) for one in range(1, 65) if _shared(linear, ends, one)]
        raise UnsupportedArchitecture(
            f"{linear.weight} has {linear.inputs} inputs in groups of {linear.group}, which {tp} ranks can't share by "
            f"whole groups. Use one of --tp {', '.join(fitting[:8])}."
        )


def _shared(linear: QuantizedLinear, ends: tuple[int, ...], tp: int) -> bool:
    return linear.inputs >= tp and ends_at(linear.inputs, linear.group, ends, tp)


def _check_mxfp4(config: dict[str, Any], tensors: Mapping[str, StoredTensor], tp: int) -> None:
    """Raise ModelFilesError naming a tensor of the experts that is missing, or has another type or shape than
    config.json asks for; UnsupportedArchitecture where the experts' width has fewer groups than there are ranks."""
    experts, hidden, width = (
        number(config, name) for name in ("num_local_experts", "hidden_size", "intermediate_size")
    )
    if width // MXFP4_GROUP < tp:
        raise UnsupportedArchitecture(
            f"intermediate_size = {width} has {width // MXFP4_GROUP} groups of {MXFP4_GROUP}, which {tp} ranks can't "
            f"share. Use --tp {max(1, width // MXFP4_GROUP)} or less."
        )
    for layer in range(number(config, "num_hidden_layers")):
        for leaf, outputs, inputs in (("gate_up_proj", 2 * width, hidden), ("down_proj", hidden, width)):
            if inputs % MXFP4_GROUP:
                raise ModelFilesError(
                    f"config.json: MXFP4 needs sizes that {MXFP4_GROUP} divides, and {inputs} is none."
                )
            stem = f"model.layers.{layer}.mlp.experts.{leaf}"
            _expect(tensors, f"{stem}_blocks", (experts, outputs, inputs // MXFP4_GROUP, MXFP4_GROUP // 2))
            _expect(tensors, f"{stem}_scales", (experts, outputs, inputs // MXFP4_GROUP))


def _expect(tensors: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...]) -> None:
    tensor = tensors.get(name)
    if tensor is None:
        raise ModelFilesError(f"The weights have no tensor {name}, which MXFP4 needs. Download the checkpoint again.")
    if tensor.type.name != "U8" or tensor.shape != shape:
        raise ModelFilesError(
            f"{name} is {tensor.type.name} of shape {list(tensor.shape)}; by config.json it is U8 of {list(shape)}. Is "
            "this the checkpoint of its config?"
        )
