"""deepseek_v3 (R1, and the text part of Kimi K2) and glm4_moe_lite: attention over compressed keys and values (MLA)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worker.families.family import Experts, Family, Roles, TextPart, sparse_but_first
from worker.families.gguf import (
    KEYS_OF_HEADS,
    ROUTED_LAYER_NAMES,
    VALUES_OF_HEADS,
    Gguf,
    Metadata,
    layers_described,
    routed_experts_described,
    sparse_layers,
)
from worker.families.parts import EXPERTS, FEED_FORWARD, QWEN_EXPERTS, ROUTED, ROUTED_EXPERTS, gated

_LATENT: Roles = {
    "self_attn.q_proj": "colwise",
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}
_ROLES: Roles = {**_LATENT, **FEED_FORWARD, **EXPERTS, **gated("mlp.shared_experts")}
_FIELDS = (
    *("rms_norm_eps", "tie_word_embeddings", "intermediate_size", "hidden_act", "attention_bias"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rope_interleave"),
    *ROUTED,
    "n_shared_experts",
)


_GGUF_NAMES = ROUTED_LAYER_NAMES | {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    f"self_attn.{KEYS_OF_HEADS}": "attn_k_b",
    f"self_attn.{VALUES_OF_HEADS}": "attn_v_b",
}
# How scores of experts are made; a file that does not say it is one of DeepSeek V2.
_SHARES = 1
_SIGMOIDS = 2
_LOGARITHM = "deepseek2.rope.scaling.yarn_log_multiplier"


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    scores = model.whole("deepseek2.expert_gating_func", _SHARES)
    if scores != _SIGMOIDS:
        raise model.wrong(
            "deepseek2.expert_gating_func", scores, f"{_SIGMOIDS} (sigmoids, as in DeepSeek V3) is served"
        )
    turned = model.whole("deepseek2.rope.dimension_count")
    query_rank = model.whole("deepseek2.attention.q_lora_rank", None)
    head = model.whole("deepseek2.attention.key_length_mla")
    if head <= turned:
        raise model.wrong("deepseek2.attention.key_length_mla", head, f"a width above {turned} is needed")
    rope: dict[str, Any] = common["rope_parameters"]
    every = model.real(_LOGARITHM, None)
    if every is not None:
        rope = rope | {"mscale": 10 * every, "mscale_all_dim": 10 * every}
    return {
        "hidden_act": "silu",
        "head_dim": turned,
        "num_key_value_heads": common["num_attention_heads"],
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in model.tensors,
        "q_lora_rank": query_rank,
        "kv_lora_rank": model.whole("deepseek2.attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": head - turned,
        "v_head_dim": model.whole("deepseek2.attention.value_length_mla"),
        "rope_parameters": rope,
        **routed_experts_described(model),
    }


def _is_lite(model: Metadata) -> bool:
    """A model of which some layers with experts lie before one without."""
    kinds = sparse_layers(model, layers_described(model, model.whole("deepseek2.block_count")))
    return kinds != sorted(kinds)


def _lite_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    kinds = sparse_layers(model, layers_described(model, common["num_hidden_layers"]))
    return _from_gguf(model, common) | {"mlp_layer_types": kinds}


FAMILIES = [
    Family(
        "deepseek_v3",
        _ROLES,
        (*_FIELDS, "first_k_dense_replace"),
        aliases={"n_routed_experts": "num_local_experts"},
        latent="turned",
        experts=ROUTED_EXPERTS,
        gguf=(Gguf("deepseek2", _from_gguf, _GGUF_NAMES, yarn_logarithm=True),),
    ),
    Family(
        "glm4_moe_lite",
        _ROLES,
        (*_FIELDS, "mlp_layer_types"),
        aliases={"n_routed_experts": "num_local_experts", "qk_rope_head_dim": "head_dim"},
        latent="turned",
        experts=replace(ROUTED_EXPERTS, layers=sparse_but_first),
        gguf=(Gguf("deepseek2", _lite_from_gguf, _GGUF_NAMES, when=_is_lite, yarn_logarithm=True),),
    ),
    Family(
        "mistral4",
        _ROLES,
        (*_FIELDS, "first_k_dense_replace"),
        aliases={"n_routed_experts": "num_local_experts"},
        latent="whole",
        queries_grow=True,
        experts=Experts(
            QWEN_EXPERTS, count="n_routed_experts", stored_above=("experts.gate_up_proj", "experts.down_proj")
        ),
    ),
]

TEXT_PARTS = [TextPart("kimi_k25", "deepseek_v3", tied=True)]

SAME = {"kimi_k2": "deepseek_v3"}
"""Types of published files whose models are those of another type."""
