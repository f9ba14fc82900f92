from worker.families.family import ONLY_AFTER, Family
from worker.families.parts import DENSE, SLIDING, WIDTH_NORMS, WINDOWS, WITH_BIAS, all_but_every
from worker.families.recurrence import FULL

FAMILIES = [
    Family("olmo2", {**DENSE, **WIDTH_NORMS}, WITH_BIAS, norms=ONLY_AFTER, head_norms="all_heads"),
    Family(
        "olmo3",
        {**DENSE, **WIDTH_NORMS},
        (*WITH_BIAS, *WINDOWS),
        norms=ONLY_AFTER,
        head_norms="all_heads",
        rope_by_kind={FULL: "rope_theta", SLIDING: None},
        slides=all_but_every(4),
    ),
]
