from typing import Any

from worker.families.family import ONLY_AFTER, Experts, Family, Fields, listed_sparse
from worker.families.gguf import (
    AROUND_LAYER_NAMES,
    ROUTED_LAYER_NAMES,
    Gguf,
    Metadata,
    layers_described,
    routing_described,
    sparse_layers,
)
from worker.families.parts import (
    DENSE,
    EXPERTS,
    GATED,
    QWEN_EXPERTS,
    ROUTING,
    SLIDING,
    WINDOWS,
    all_but_every_pattern,
    gated,
)
from worker.families.recurrence import FULL

_WINDOWED_LAYERS = 64
"""The one size of older files that has windows, in three of four layers."""


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    layers = layers_described(model, common["num_hidden_layers"])
    window = model.whole("exaone4.attention.sliding_window", None)
    if "exaone4.attention.sliding_window_pattern" in model.fields:
        slides = [bool(number) for number in model.array("exaone4.attention.sliding_window_pattern").numbers()]
    else:
        windowed = len(layers) == _WINDOWED_LAYERS and window is not None
        slides = [windowed and (layer + 1) % 4 != 0 for layer in layers]
    return {
        "hidden_act": "silu",
        "sliding_window": window if any(slides) else None,
        "sliding_window_pattern": None,
        "layer_types": [SLIDING if sliding else FULL for sliding in slides],
    }


_MOE_NAMES = {
    **{name: stored for name, stored in ROUTED_LAYER_NAMES.items() if "correction" not in name},
    "mlp.e_score_correction_bias": "exp_probs_b.bias",
}


def _moe_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    layers = layers_described(model, common["num_hidden_layers"])
    slides = model.array("exaone-moe.attention.sliding_window_pattern").numbers()[: len(layers)]
    return {
        "hidden_act": "silu",
        "sliding_window": model.whole("exaone-moe.attention.sliding_window"),
        "sliding_window_pattern": None,
        "layer_types": [SLIDING if sliding else FULL for sliding in slides],
        "mlp_layer_types": sparse_layers(model, layers),
        "num_experts": model.whole("exaone-moe.expert_count"),
        "num_shared_experts": model.whole("exaone-moe.expert_shared_count"),
        **routing_described(model),
    }


def _rotates(fields: Fields, layer: int, kind: str) -> bool:
    return kind == SLIDING or fields["sliding_window"] is None


FAMILIES = [
    Family(
        "exaone4",
        DENSE,
        (*GATED, *WINDOWS, "sliding_window_pattern"),
        norms=ONLY_AFTER,
        head_norms="each_head",
        slides=all_but_every_pattern,
        rotates=_rotates,
        gguf=(Gguf("exaone4", _from_gguf, AROUND_LAYER_NAMES),),
    ),
    Family(
        "exaone_moe",
        {**DENSE, **EXPERTS, **gated("mlp.shared_experts")},
        (
            *(*GATED, *WINDOWS, "sliding_window_pattern", "mlp_layer_types", "first_k_dense_replace"),
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_experts", *ROUTING),
        ),
        head_norms="each_head",
        slides=all_but_every_pattern,
        rotates=_rotates,
        experts=Experts(
            QWEN_EXPERTS,
            layers=listed_sparse,
            shared="num_shared_experts",
            sigmoid_scores=True,
            correction="router",
        ),
        gguf=(Gguf("exaone-moe", _moe_from_gguf, _MOE_NAMES),),
        stored_names=((".gate.e_score_correction_bias", ".e_score_correction_bias"),),
    ),
]
