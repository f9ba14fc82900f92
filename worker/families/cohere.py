from worker.families.family import Family
from worker.families.parts import DENSE

FAMILIES = [
    Family(
        "cohere",
        {**DENSE, "self_attn.q_norm": "colwise", "self_attn.k_norm": "colwise"},
        rope_neighbours=True,
    ),
    Family("cohere2", DENSE, rope_neighbours=True),
]
