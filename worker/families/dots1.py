from typing import Any

from worker.families.family import Experts, Family
from worker.families.gguf import (
    ROUTED_LAYER_NAMES,
    Gguf,
    Metadata,
    biases_described,
    layers_described,
    routing_described,
)
from worker.families.parts import DENSE, EXPERTS, QWEN_EXPERTS, WINDOWS, WITH_BIAS, from_max_window, shared
from worker.families.recurrence import FULL


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    # Files have no windows, and so have the published models.
    layers = layers_described(model, common["num_hidden_layers"])
    return {
        "hidden_act": "silu",
        "attention_bias": biases_described(model)["attention_bias"],
        "n_routed_experts": model.whole("dots1.expert_count"),
        "n_shared_experts": model.whole("dots1.expert_shared_count"),
        "sliding_window": None,
        "layer_types": [FULL for _ in layers],
        **routing_described(model),
    }


FAMILIES = [
    Family(
        "dots1",
        {**DENSE, **EXPERTS, **shared("shared_experts")},
        (
            *(*WITH_BIAS, "max_window_layers", *WINDOWS),
            *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
            *("n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob"),
        ),
        aliases={"n_routed_experts": "num_local_experts"},
        head_norms="each_head",
        slides=from_max_window,
        experts=Experts(QWEN_EXPERTS, count="n_routed_experts", sigmoid_scores=True, correction="router"),
        gguf=(Gguf("dots1", _from_gguf, ROUTED_LAYER_NAMES),),
    )
]
