"""Decides from config.json and the headers of its files whether a quantized checkpoint can be served and shared."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from control.errors import ModelFilesError, SettingsError, UnsupportedArchitecture
from worker.families.family import Family
from worker.families.registry import FAMILIES
from worker.repository import validation
from worker.repository.config_fields import fields_of, number
from worker.weights.formats import StoredTensor
from worker.weights.quantized_layers import FEED_FORWARD, QuantizedLinear, borders, layers
from worker.weights.safetensors_header import text_tensors
from worker.weights.schemes import MXFP4_GROUP, scheme_of
from worker.weights.sharding import ends_at

TOGETHER = re.compile(r"\.experts\.(?:gate_up|down)_proj|\.block_sparse_moe\.(?:input|output)_linear\.")
"""The names of tensors that hold all experts of a layer."""
ATTENTION = re.compile(r"\.(?:o_proj|dense|out_proj)$")
"""Layers of whose inputs each rank has a share."""

LAYER = re.compile(r"\blayers\.(\d+)\.")


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
    family = FAMILIES.get(str(config.get("model_type")))
    sizes = None if family is None else _Sizes(config, family)
    for module, linear in linears.items():
        expected = None if sizes is None else sizes.of(module)
        if expected is not None and (linear.outputs, linear.inputs) != expected:
            raise ModelFilesError(
                f"{linear.weight} has {linear.outputs} outputs of {linear.inputs} inputs; config.json says "
                f"{expected[0]} of {expected[1]}. Is this the checkpoint of its config?"
            )
        _check_share(module, linear, ends, tp)


class _Sizes:
    """(outputs, inputs) of the linear layers that most families have, by config.json with the defaults of
    transformers' class."""

    def __init__(self, config: dict[str, Any], family: Family) -> None:
        self._config = config
        self._family = family
        self._fields = fields_of(config, family)
        self._layers = number(config, "num_hidden_layers")
        self._kv_heads = validation.layer_kv_heads(config)
        alike: list[dict[str, int]] = [{}] * self._layers
        self._fields_by_layer = alike if family.heads_by_layer is None else family.heads_by_layer(config)

    def of(self, module: str) -> tuple[int, int] | None:
        """None for a layer that few families have, and in a layer beyond the model's, which is not read."""
        place = LAYER.search(module)
        layer = 0 if place is None else int(place[1])
        if layer >= self._layers or ".shared_expert" in module:
            return None
        sizes = self._attention(layer) if ".self_attn." in module else self._feed_forward(module, layer)
        return sizes.get(module.rpartition(".")[2])

    def _attention(self, layer: int) -> dict[str, tuple[int, int]]:
        hidden = number(self._config, "hidden_size")
        heads = number(self._config, "num_attention_heads")
        fields = self._fields
        if self._family.latent:
            head = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
            return {"q_proj": (heads * head, hidden), "o_proj": (hidden, heads * fields["v_head_dim"])}
        usual: int = fields.get("head_dim", self._config.get("head_dim")) or hidden // heads
        head = self._fields_by_layer[layer].get("head_dim", usual)
        value = fields.get("v_head_dim") or head
        gated = 2 if self._family.output_gate else 1
        return {
            "q_proj": (gated * heads * head, hidden),
            "k_proj": (self._kv_heads[layer] * head, hidden),
            "v_proj": (self._kv_heads[layer] * value, hidden),
            "o_proj": (hidden, heads * value),
            "gate_proj": (heads, hidden),
        }

    def _feed_forward(self, module: str, layer: int) -> dict[str, tuple[int, int]]:
        """Of experts if `module` is one's."""
        hidden = number(self._config, "hidden_size")
        fields = self._fields
        expert_width = fields.get("moe_intermediate_size", self._config.get("moe_intermediate_size"))
        inner = (
            expert_width
            if expert_width and ".experts." in module
            else self._family.feed_forward_width({**self._config, **fields})
        )
        if not isinstance(inner, int):
            return {}
        if validation.is_double_wide(self._config, fields, layer):
            inner *= 2
        sizes: dict[str, tuple[int, int]] = dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), (inner, hidden))
        return sizes | dict.fromkeys(("down_proj", "w2"), (hidden, inner))


def _check_share(module: str, linear: QuantizedLinear, ends: tuple[int, ...], tp: int) -> None:
    """Raise UnsupportedArchitecture unless `tp` ranks have whole groups of the layer's inputs."""
    if tp == 1 or linear.unit == 1:
        return
    if FEED_FORWARD.search(module) is None:
        if ATTENTION.search(module) is None:
            return
        ends = ()  # heads are shared evenly
    if not _shared(linear, ends, tp):
        raise UnsupportedArchitecture(
            f"{linear.weight} has {linear.inputs} inputs in units of {linear.unit}, which {tp} ranks can't share by "
            f"whole units. Use one of --tp {validation.fitting_ranks(lambda ranks: _shared(linear, ends, ranks))}."
        )


def _shared(linear: QuantizedLinear, ends: tuple[int, ...], tp: int) -> bool:
    return linear.inputs >= tp and ends_at(linear.inputs, linear.unit, ends, tp)


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
