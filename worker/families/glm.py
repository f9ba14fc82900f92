from worker.families.family import Experts, Family
from worker.families.parts import (
    ATTENTION,
    DENSE,
    EXPERTS,
    PACKED_FEED_FORWARD,
    QWEN_EXPERTS,
    WITH_BIAS,
    shared,
)

FAMILIES = [
    Family("glm", {**ATTENTION, **PACKED_FEED_FORWARD}, WITH_BIAS, output_bias=False, rope_neighbours=True),
    Family(
        "glm4",
        {**ATTENTION, **PACKED_FEED_FORWARD},
        WITH_BIAS,
        norms=(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        output_bias=False,
        rope_neighbours=True,
    ),
    Family(
        "glm4_moe",
        {**DENSE, **EXPERTS, **shared("shared_experts")},
        experts=Experts(QWEN_EXPERTS, count="n_routed_experts"),
    ),
]
