from worker.families.family import Family, TextPart
from worker.families.parts import ATTENTION, DENSE, EXPERTS, GATED, IN_BLOCK_SPARSE_MOE, MIXTRAL_EXPERTS, WINDOWS

FAMILIES = [
    Family("ministral", DENSE, (*GATED, *WINDOWS)),
    Family("ministral3", DENSE, (*GATED, "sliding_window"), queries_grow=True),
    Family("mistral", DENSE, (*GATED, "sliding_window")),
    Family(
        "mixtral",
        {**ATTENTION, **EXPERTS},
        (*GATED, "sliding_window", "num_local_experts", "num_experts_per_tok"),
        aliases={"num_local_experts": "num_experts"},
        experts=MIXTRAL_EXPERTS,
        stored_names=IN_BLOCK_SPARSE_MOE,
    ),
]

TEXT_PARTS = [TextPart("mistral3", None, tied=True)]
