from worker.families.family import Family
from worker.families.parts import DENSE, GATED

FAMILIES = [Family("ernie4_5", DENSE, (*GATED, "use_bias"), rope_neighbours=True)]
