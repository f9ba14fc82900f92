"""deepseek_v3 (R1, and the text part of Kimi K2) and glm4_moe_lite: attention over compressed keys and values (MLA)."""

from __future__ import annotations

from worker.families.family import Experts, Family, Fields, TextPart
from worker.families.parts import EXPERTS, FEED_FORWARD, QWEN_EXPERTS, shared
from worker.families.roles import Roles

_LATENT: Roles = {
    "self_attn.q_proj": "colwise",
    "self_attn.q_b_proj": "colwise",
    "self_attn.kv_b_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}
_ROLES: Roles = {**_LATENT, **FEED_FORWARD, **EXPERTS, **shared("shared_experts")}
_FIELDS = (
    *("rms_norm_eps", "tie_word_embeddings", "intermediate_size", "hidden_act", "attention_bias"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rope_interleave"),
    *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    *("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob"),
)


def _is_sparse_lite(fields: Fields, layer: int) -> bool:
    kinds = fields["mlp_layer_types"]
    return layer > 0 if kinds is None else kinds[layer] == "sparse"


FAMILIES = [
    Family(
        "deepseek_v3",
        _ROLES,
        (*_FIELDS, "first_k_dense_replace"),
        aliases={"n_routed_experts": "num_local_experts"},
        latent=True,
        experts=Experts(QWEN_EXPERTS, count="n_routed_experts", sigmoid_scores=True, correction="router"),
    ),
    Family(
        "glm4_moe_lite",
        _ROLES,
        (*_FIELDS, "mlp_layer_types"),
        aliases={"n_routed_experts": "num_local_experts", "qk_rope_head_dim": "head_dim"},
        latent=True,
        experts=Experts(
            QWEN_EXPERTS,
            count="n_routed_experts",
            layers=_is_sparse_lite,
            sigmoid_scores=True,
            correction="router",
        ),
    ),
]

TEXT_PARTS = [TextPart("kimi_k25", "deepseek_v3", tied=True)]

SAME = {"kimi_k2": "deepseek_v3"}
"""Types of published files whose models are those of another type."""
