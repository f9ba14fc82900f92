from worker.families.family import Family
from worker.families.parts import ATTENTION, EXPERTS, IN_BLOCK_SPARSE_MOE, MIXTRAL_EXPERTS, WIDTH_NORMS

FAMILIES = [
    Family(
        "minimax_m2",
        {**ATTENTION, **WIDTH_NORMS, **EXPERTS},
        experts=MIXTRAL_EXPERTS,
        stored_names=IN_BLOCK_SPARSE_MOE,
    )
]
