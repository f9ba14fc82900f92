from worker.families.family import Family
from worker.families.parts import DENSE, WITH_BIAS

FAMILIES = [Family("hunyuan_v1_dense", DENSE, WITH_BIAS, head_norms="each_turned_head")]
