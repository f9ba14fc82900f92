from typing import Any

from worker.families.family import Family
from worker.families.gguf import (
    ROUTED_LAYER_NAMES,
    Gguf,
    Metadata,
    has_query_bias,
    layers_described,
    routed_experts_described,
)
from worker.families.parts import DENSE, EXPERTS, ROUTED, ROUTED_EXPERTS, WINDOWS, WITH_BIAS, from_max_window, gated
from worker.families.recurrence import FULL


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    # Files have no windows, and so have the published models.
    layers = layers_described(model, common["num_hidden_layers"])
    return {
        "hidden_act": "silu",
        "attention_bias": has_query_bias(model),
        "sliding_window": None,
        "layer_types": [FULL for _ in layers],
        **routed_experts_described(model),
    }


FAMILIES = [
    Family(
        "dots1",
        {**DENSE, **EXPERTS, **gated("mlp.shared_experts")},
        (*WITH_BIAS, "max_window_layers", *WINDOWS, *ROUTED, "n_shared_experts", "first_k_dense_replace"),
        aliases={"n_routed_experts": "num_local_experts"},
        head_norms="each_head",
        slides=from_max_window,
        experts=ROUTED_EXPERTS,
        gguf=(Gguf("dots1", _from_gguf, ROUTED_LAYER_NAMES),),
    )
]
