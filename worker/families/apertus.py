from worker.families.family import Family
from worker.families.parts import ATTENTION, UNGATED_FEED_FORWARD

FAMILIES = [Family("apertus", {**ATTENTION, **UNGATED_FEED_FORWARD})]
