"""mimo_v2_flash: values of another width than keys; layers with a window have sinks, and twice the key-value heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.families.family import Family, sparse_but_first
from worker.families.parts import ATTENTION, EXPERTS, FEED_FORWARD, ROUTED, ROUTED_EXPERTS, SLIDING, WINDOWS, WITH_BIAS
from worker.families.recurrence import FULL

_PERIOD = 6
"""Every sixth layer, and the first one, attends to all positions."""
_DEFAULT_HEADS = 4


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the window by the name of transformers' class: published files have one that does not count
    the token itself, and null for a scale of 1."""
    before = config.get("sliding_window_size")
    if before is not None:
        config = config | {"sliding_window": before + 1 if isinstance(before, int) else before}
    if "routed_scaling_factor" in config and config["routed_scaling_factor"] is None:
        config = config | {"routed_scaling_factor": 1.0}
    return config


def layer_kinds(config: dict[str, Any]) -> list[str]:
    kinds: list[str] | None = config.get("layer_types")
    return kinds or [_kind(layer) for layer in range(config["num_hidden_layers"])]


def _kind(layer: int) -> str:
    return FULL if layer == 0 or (layer + 1) % _PERIOD == 0 else SLIDING


def heads_by_layer(config: dict[str, Any]) -> list[dict[str, int]]:
    """`config` must have been checked."""
    shared = config.get("num_key_value_heads", _DEFAULT_HEADS)
    if shared is None:  # as many as query heads; then the layers with a window are refused
        shared = config["num_attention_heads"]
    return [{"num_key_value_heads": 2 * shared} if kind == SLIDING else {} for kind in layer_kinds(config)]


FAMILIES = [
    Family(
        "mimo_v2_flash",
        {**ATTENTION, **FEED_FORWARD, **EXPERTS, "self_attn.sinks": "colwise"},
        (*WITH_BIAS, *WINDOWS, "v_head_dim", "attention_value_scale", "mlp_layer_types", *ROUTED),
        aliases={"n_routed_experts": "num_local_experts"},
        completed=completed,
        output_bias=False,
        layer_kinds=layer_kinds,
        heads_by_layer=heads_by_layer,
        has_sinks=lambda kind: kind == SLIDING,
        rope_by_kind={FULL: None, SLIDING: None},
        experts=replace(ROUTED_EXPERTS, layers=sparse_but_first),
        stored_names=((".self_attn.sinks", ".self_attn.attention_sink_bias"),),
    )
]
