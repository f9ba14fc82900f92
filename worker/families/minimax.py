from dataclasses import replace

from worker.families.family import Family
from worker.families.parts import ATTENTION, EXPERTS, GATED, IN_BLOCK_SPARSE_MOE, MIXTRAL_EXPERTS, WIDTH_NORMS

FAMILIES = [
    Family(
        "minimax_m2",
        {**ATTENTION, **WIDTH_NORMS, **EXPERTS},
        (*GATED, "num_local_experts", "num_experts_per_tok", "rotary_dim"),
        aliases={"num_local_experts": "num_experts"},
        own_defaults={"rotary_dim": None},
        head_norms="all_heads",
        experts=replace(MIXTRAL_EXPERTS, sigmoid_scores=True, correction="mixture"),
        stored_names=IN_BLOCK_SPARSE_MOE,
    )
]
