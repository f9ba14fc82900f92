"""gemma3n_text: hidden rows of several streams (AltUp), a residual of low rank beside attention (LAuReL), inputs of the
layers, gates of which most stay 0, and shared keys and values."""

from __future__ import annotations

from typing import Any, cast

from worker.families.family import AROUND, Family, TextPart
from worker.families.parts import DENSE, OMITTED, SIZES, SLIDING, WINDOWS
from worker.families.recurrence import FULL

_PERIOD = 5
"""Every fifth layer attends to all positions."""
_SPARSE = [0.95] * 10
"""The shares of the gate that stay 0 in the first layers of a model that has more of them."""


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the shares that follow from the number of layers, and one width of the feed-forward networks
    where all have it. Numbers that are none stay, and are refused later."""
    layers = config.get("num_hidden_layers", 35)
    if config.get("activation_sparsity_pattern") is None and isinstance(layers, int) and 0 < layers < 4096:
        sparse = _SPARSE if layers > len(_SPARSE) else []
        config = config | {"activation_sparsity_pattern": [*sparse, *[0.0] * (layers - len(sparse))]}
    widths = config.get("intermediate_size")
    if isinstance(widths, list) and widths and len(set(map(str, cast(list[Any], widths)))) == 1:
        config = config | {"intermediate_size": widths[0]}
    return config


def layer_kinds(config: dict[str, Any]) -> list[str]:
    layers = range(config["num_hidden_layers"])
    kinds: list[str] | None = config.get("layer_types")
    return kinds or [SLIDING if (layer + 1) % _PERIOD else FULL for layer in layers]


FAMILIES = [
    Family(
        "gemma3n_text",
        DENSE,
        (
            *(*SIZES, *WINDOWS, "intermediate_size", "attention_bias", "hidden_activation", "final_logit_softcapping"),
            *("num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
            *("altup_num_inputs", "altup_active_idx", "altup_correct_scale", "laurel_rank"),
            "activation_sparsity_pattern",
        ),
        one_for_all=frozenset({"intermediate_size"}),
        completed=completed,
        norms=AROUND,
        head_norms="each_head",
        value_norm=True,
        scores_scaled=False,
        scaled_embedding=True,
        layer_kinds=layer_kinds,
        layer_ids_end=True,
        rope_by_kind={FULL: "rope_theta", SLIDING: "rope_local_base_freq"},
        rotates_apart=True,
    )
]

TEXT_PARTS = [
    TextPart("gemma3n", "gemma3n_text", tied=True, omitted=(*OMITTED, "hidden_size_per_layer_input", "laurel_rank"))
]
