from typing import Any

from worker.families.family import Experts, Family
from worker.families.gguf import (
    FUSED_LAYER_NAMES,
    ROUTED_LAYER_NAMES,
    Gguf,
    Metadata,
    biases_described,
    rotation_described,
    routing_described,
)
from worker.families.parts import (
    ATTENTION,
    DENSE,
    EXPERTS,
    PACKED_FEED_FORWARD,
    QWEN_EXPERTS,
    WITH_BIAS,
    shared,
)

_GLM4_NAMES = FUSED_LAYER_NAMES | {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}


def _glm4_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": biases_described(model)["attention_bias"],
        **rotation_described(model, common),
    }


_MOE_NAMES = ROUTED_LAYER_NAMES | {"post_attention_layernorm": "post_attention_norm"}


def _moe_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": biases_described(model)["attention_bias"],
        "use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors,
        "n_routed_experts": model.whole("glm4moe.expert_count"),
        "n_shared_experts": model.whole("glm4moe.expert_shared_count"),
        **routing_described(model),
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
        {**DENSE, **EXPERTS, **shared("shared_experts")},
        (
            *WITH_BIAS,
            *("use_qk_norm", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
            *("n_group", "topk_group", "first_k_dense_replace", "routed_scaling_factor", "norm_topk_prob"),
        ),
        aliases={"n_routed_experts": "num_local_experts"},
        head_norms="each_head",
        head_norm_switch="use_qk_norm",
        output_bias=False,
        experts=Experts(QWEN_EXPERTS, count="n_routed_experts", sigmoid_scores=True, correction="router"),
        gguf=(Gguf("glm4moe", _moe_from_gguf, _MOE_NAMES, partial=True),),
    ),
]
