from dataclasses import replace
from typing import Any

from worker.families.family import BEFORE_BOTH, Family
from worker.families.gguf import FUSED_LAYER_NAMES, Gguf, Metadata, rotation_described
from worker.families.parts import (
    ATTENTION,
    EXPERTS,
    GATED,
    IN_BLOCK_SPARSE_MOE,
    MIXTRAL_EXPERTS,
    PACKED_FEED_FORWARD,
    QUERY_KEY_VALUE,
    WITH_BIAS,
)

_PHI3_NAMES = {
    **{name: stored for name, stored in FUSED_LAYER_NAMES.items() if not name.endswith(("q_proj", "k_proj", "v_proj"))},
    "self_attn.qkv_proj": "attn_qkv",
}


def _phi3_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "sliding_window": model.whole("phi3.attention.sliding_window", None, least=0) or None,
        "original_max_position_embeddings": common["max_position_embeddings"],
        **rotation_described(model, common),
    }


_PHI2_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_PHI2_OUTER = {"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"}


def _phi2_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_new",
        "layer_norm_eps": common["rms_norm_eps"],
        "qk_layernorm": False,
        **rotation_described(model, common),
    }


FAMILIES = [
    Family(
        "phi",
        {**QUERY_KEY_VALUE, "self_attn.dense": "rowwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"},
        (
            *("layer_norm_eps", "tie_word_embeddings", "head_dim", "intermediate_size", "hidden_act"),
            "qk_layernorm",
        ),
        norms=BEFORE_BOTH,
        norm_kind="layer_with_bias",
        parallel=True,
        head_norms="each_head",
        head_norm_switch="qk_layernorm",
        head_norms_by_hidden_size=True,
        activations={"gelu_new": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "gelu_pytorch_tanh", "silu": "silu"},
        biased=True,
        gguf=(Gguf("phi2", _phi2_from_gguf, _PHI2_NAMES, partial=True, outer=_PHI2_OUTER),),
        native_names=(
            (".mlp.up_proj", ".mlp.fc1"),
            (".mlp.down_proj", ".mlp.fc2"),
            (".self_attn.o_proj", ".self_attn.dense"),
            (".self_attn.q_norm", ".self_attn.q_layernorm"),
            (".self_attn.k_norm", ".self_attn.k_layernorm"),
            ("model.norm.", "model.final_layernorm."),
        ),
    ),
    Family(
        "phi3",
        {"self_attn.qkv_proj": "query_key_value", "self_attn.o_proj": "rowwise", **PACKED_FEED_FORWARD},
        (*GATED, "sliding_window"),
        longrope_names=frozenset({"su", "yarn"}),
        gguf=(Gguf("phi3", _phi3_from_gguf, _PHI3_NAMES, partial=True),),
    ),
    Family(
        "phimoe",
        {**ATTENTION, **EXPERTS},
        (
            *(*WITH_BIAS, "sliding_window", "lm_head_bias"),
            *("num_local_experts", "num_experts_per_tok", "router_jitter_noise"),
        ),
        norm_kind="layer_with_bias",
        head_bias="lm_head_bias",
        experts=replace(MIXTRAL_EXPERTS, router="router", jitter="router_jitter_noise"),
        stored_names=((".mlp.router.", ".block_sparse_moe.gate."), *IN_BLOCK_SPARSE_MOE),
    ),
]
