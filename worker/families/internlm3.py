from worker.families.family import Family
from worker.families.parts import DENSE, WITH_BIASES

FAMILIES = [
    Family("internlm3", DENSE, WITH_BIASES, aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"}),
]
