from worker.families.family import Family
from worker.families.parts import ATTENTION, UNGATED_FEED_FORWARD, WITH_BIASES

FAMILIES = [
    Family("arcee", {**ATTENTION, **UNGATED_FEED_FORWARD}, WITH_BIASES, activations={"relu2": "relu2"}),
]
