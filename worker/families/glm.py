from typing import Any

from worker.families.family import Family
from worker.families.gguf import (
    FUSED_LAYER_NAMES,
    ROUTED_LAYER_NAMES,
    Gguf,
    Metadata,
    has_query_bias,
    rotation_described,
    routed_experts_described,
)
from worker.families.parts import (
    ATTENTION,
    DENSE,
    EXPERTS,
    PACKED_FEED_FORWARD,
    ROUTED,
    ROUTED_EXPERTS,
    WITH_BIAS,
    gated,
)

_GLM4_NAMES = FUSED_LAYER_NAMES | {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}


def _glm4_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": has_query_bias(model),
        **rotation_described(model, common),
    }


_MOE_NAMES = ROUTED_LAYER_NAMES | {"post_attention_layernorm": "post_attention_norm"}


def _moe_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": has_query_bias(model),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
        **routed_experts_described(model),
        **rotation_described(model, common),
    }


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
        gguf=(Gguf("glm4", _glm4_from_gguf, _GLM4_NAMES, partial=True),),
    ),
    Family(
        "glm4_moe",
        {**DENSE, **EXPERTS, **gated("mlp.shared_experts")},
        (*WITH_BIAS, "use_qk_norm", *ROUTED, "n_shared_experts", "first_k_dense_replace"),
        aliases={"n_routed_experts": "num_local_experts"},
        head_norms="each_head",
        head_norm_switch="use_qk_norm",
        output_bias=False,
        experts=ROUTED_EXPERTS,
        gguf=(Gguf("glm4moe", _moe_from_gguf, _MOE_NAMES, partial=True),),
    ),
]
