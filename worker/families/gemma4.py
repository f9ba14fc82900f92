from __future__ import annotations

from typing import Any

from worker.families.family import AROUND, BATCHABLE_ROPE, Experts, Family, TextPart
from worker.families.parts import DENSE, OMITTED, SIZES, SLIDING, WINDOWS
from worker.families.recurrence import FULL


def layer_kinds(config: dict[str, Any]) -> list[str]:
    """Each layer's kind of attention. The last layer has full attention, whatever the file says."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [FULL if layer % 6 == 5 else SLIDING for layer in range(layers)]
    return [*kinds[:-1], FULL]


def heads_by_layer(config: dict[str, Any]) -> list[dict[str, int]]:
    """transformers saves them as `per_layer_config`; Google's files name those of the layers with full attention.
    `config` must have been checked."""
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        fields = {int(layer): one for layer, one in by_layer.items()}
        return [fields.get(layer, {}) for layer in range(config["num_hidden_layers"])]
    full = {"head_dim": config.get("global_head_dim") or 512}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = config["num_global_key_value_heads"]
    return [full if kind == FULL else {} for kind in layer_kinds(config)]


FAMILIES = [
    Family(
        "gemma4_text",
        {**DENSE, "experts": "experts"},
        (
            *(*SIZES, *WINDOWS, "intermediate_size", "attention_bias", "hidden_activation", "final_logit_softcapping"),
            *("num_kv_shared_layers", "attention_k_eq_v", "use_double_wide_mlp"),
            *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
            *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
        ),
        norms=AROUND,
        head_norms="each_head",
        value_norm=True,
        keys_are_values=lambda fields, kind: fields["attention_k_eq_v"] and kind == FULL,
        scores_scaled=False,
        scaled_embedding=True,
        layer_scales=True,
        layer_kinds=layer_kinds,
        rope_by_kind={FULL: None, SLIDING: None},
        rotates_apart=True,
        rope_types=BATCHABLE_ROPE | {"proportional"},
        experts=Experts(
            ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight", "experts.{}.down_proj.weight"),
            chosen="top_k_experts",
            switch="enable_moe_block",
            stored_above=("experts.gate_up_proj", "experts.down_proj"),
            router="router",
            router_scales=True,
            beside=("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        ),
        heads_by_layer=heads_by_layer,
        bidirectional_images="vision",
    )
]

TEXT_PARTS = [TextPart("gemma4", "gemma4_text", tied=True, omitted=OMITTED)]
