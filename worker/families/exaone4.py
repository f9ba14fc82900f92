from worker.families.family import ONLY_AFTER, Family
from worker.families.parts import DENSE, GATED, SLIDING, WINDOWS, all_but_every_pattern

FAMILIES = [
    Family(
        "exaone4",
        DENSE,
        (*GATED, *WINDOWS, "sliding_window_pattern"),
        norms=ONLY_AFTER,
        head_norms="each_head",
        slides=all_but_every_pattern,
        rotates=lambda fields, layer, kind: kind == SLIDING or fields["sliding_window"] is None,
    )
]
