from worker.families.family import Experts, Family
from worker.families.parts import DENSE, EXPERTS, QWEN_EXPERTS, WINDOWS, WITH_BIAS, from_max_window, shared

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
    )
]
