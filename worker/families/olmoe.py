from worker.families.family import Experts, Family
from worker.families.parts import ATTENTION, EXPERTS, QWEN_EXPERTS, WIDTH_NORMS, WITH_BIAS

FAMILIES = [
    Family(
        "olmoe",
        {**ATTENTION, **WIDTH_NORMS, **EXPERTS},
        (*WITH_BIAS, "num_experts", "num_experts_per_tok", "norm_topk_prob"),
        aliases={"num_experts": "num_local_experts"},
        torch_numbers=("clip_qkv",),
        head_norms="all_heads",
        experts=Experts(QWEN_EXPERTS),
    )
]
