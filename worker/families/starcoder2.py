from worker.families.family import Family
from worker.families.parts import ATTENTION

FAMILIES = [Family("starcoder2", {**ATTENTION, "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"})]
