from worker.families.family import Family
from worker.families.parts import DENSE, WITH_BIASES

FAMILIES = [Family("seed_oss", DENSE, (*WITH_BIASES, "attention_out_bias"))]
