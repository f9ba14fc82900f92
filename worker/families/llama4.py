"""llama4_text: attention that ends at the borders of chunks, layers without positions, and experts whose inputs are
weighted."""

from __future__ import annotations

from typing import Any, cast

from control.errors import ModelFilesError
from worker.families.family import Experts, Family, Roles, TextPart
from worker.families.fields import is_whole
from worker.families.gguf import LAYER_NAMES, Gguf, Metadata, gated_names, layers_described, sparse_layers
from worker.families.parts import ATTENTION, CHUNKED, WITH_BIAS, gated
from worker.families.recurrence import FULL

_ROLES: Roles = {
    **ATTENTION,
    **gated("feed_forward"),
    **gated("feed_forward.shared_expert"),
    "feed_forward.experts": "experts",
}
_MOST_LAYERS = 4096


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the lists of layers that follow from numbers: which are turned by positions, which see no
    further than their chunk, and which have experts. Numbers that are none stay, and are refused later; raises
    ModelFilesError for null."""
    for name in ("no_rope_layer_interval", "interleave_moe_layer_step"):
        if config.get(name, 1) is None:
            raise ModelFilesError(f"config.json has {name} = null; remove the field, or give it a value.")
    layers, period, step = (
        config.get(name, default)
        for name, default in (
            ("num_hidden_layers", 0),
            ("no_rope_layer_interval", 4),
            ("interleave_moe_layer_step", 1),
        )
    )
    rotated = config.get("no_rope_layers")
    if not (is_whole(layers, most=_MOST_LAYERS) and is_whole(period) and is_whole(step)):
        return config
    if rotated is not None and not isinstance(rotated, list):
        return config
    rotated = cast(list[Any], rotated) or [int((layer + 1) % period != 0) for layer in range(layers)]
    kinds = [CHUNKED if turned else FULL for turned in rotated[:layers]]
    sparse = list(range(step - 1, layers, step))
    return config | {
        "no_rope_layers": rotated,
        "layer_types": config.get("layer_types") or kinds,
        "moe_layers": sparse if config.get("moe_layers") is None else config["moe_layers"],
    }


_GGUF_NAMES = {
    **{name: stored for name, stored in LAYER_NAMES.items() if not name.startswith("mlp.")},
    **gated_names("feed_forward"),
    **gated_names("feed_forward.experts", "_exps"),
    **gated_names("feed_forward.shared_expert", "_shexp"),
    "feed_forward.router": "ffn_gate_inp",
}
_WITHOUT_NORMS = 128
"""The experts of the one model whose heads are not normed; files don't say it."""


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json from a GGUF header. Those that it lacks have llama.cpp's values, as the published models
    do."""
    layers = layers_described(model, common["num_hidden_layers"])
    experts = model.whole("llama4.expert_count")
    everywhere = model.whole("llama4.attention.sliding_window", 1, least=0) == 0
    rotated = [int(everywhere or (layer + 1) % 4 != 0) for layer in layers]
    return {
        "hidden_act": "silu",
        "attention_bias": False,
        "intermediate_size": model.whole("llama4.expert_feed_forward_length"),
        "intermediate_size_mlp": common["intermediate_size"],
        "num_local_experts": experts,
        "num_experts_per_tok": model.whole("llama4.expert_used_count"),
        "moe_layers": [layer for layer, kind in enumerate(sparse_layers(model, layers)) if kind == "sparse"],
        "no_rope_layers": rotated,
        "layer_types": [FULL if everywhere or not turned else CHUNKED for turned in rotated],
        "attention_chunk_size": 8192,
        "use_qk_norm": experts != _WITHOUT_NORMS,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }


FAMILIES = [
    Family(
        "llama4_text",
        _ROLES,
        (
            *(*WITH_BIAS, "intermediate_size_mlp", "num_local_experts", "num_experts_per_tok", "moe_layers"),
            *("no_rope_layers", "attention_chunk_size", "layer_types", "use_qk_norm"),
            *("attn_temperature_tuning", "floor_scale", "attn_scale"),
        ),
        completed=completed,
        feed_forward_width=lambda config: config.get("intermediate_size_mlp"),
        layer_kinds=lambda config: config["layer_types"],
        rotates=lambda fields, layer, kind: fields["no_rope_layers"][layer] != 0,
        rope_neighbours=True,
        unweighted_head_norms="use_qk_norm",
        unturned_queries_grow="attn_temperature_tuning",
        experts=Experts(
            (
                "feed_forward.experts.{}.gate_proj.weight",
                "feed_forward.experts.{}.up_proj.weight",
                "feed_forward.experts.{}.down_proj.weight",
            ),
            count="num_local_experts",
            stored_above=("experts.gate_up_proj", "experts.down_proj"),
            inputs_first=True,
            router="router",
            layers=lambda fields, layer: layer in fields["moe_layers"],
            sigmoid_scores=True,
            weighted_inputs=True,
        ),
        native_names=(
            (".mlp.shared_experts.", ".feed_forward.shared_expert."),
            (".mlp.experts", ".feed_forward.experts"),
            (".mlp.router", ".feed_forward.router"),
            (".mlp.gate_proj", ".feed_forward.gate_proj"),
            (".mlp.up_proj", ".feed_forward.up_proj"),
            (".mlp.down_proj", ".feed_forward.down_proj"),
        ),
        gguf=(Gguf("llama4", _from_gguf, _GGUF_NAMES),),
    ),
]

TEXT_PARTS = [TextPart("llama4", "llama4_text", tied=False)]
