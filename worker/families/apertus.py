from worker.families.family import Family
from worker.families.parts import ATTENTION, UNGATED_FEED_FORWARD, WITH_BIAS

FAMILIES = [
    Family(
        "apertus",
        {**ATTENTION, **UNGATED_FEED_FORWARD},
        WITH_BIAS,
        norms=("attention_layernorm", None, "feedforward_layernorm", None),
        head_norms="each_head",
        activations={"xielu": "xielu"},
    )
]
