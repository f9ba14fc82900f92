"""Parts of records that several families share: roles, names of experts, fields and windows."""

from __future__ import annotations

from collections.abc import Callable

from worker.families.family import Experts, Fields
from worker.families.roles import Roles

SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
"""A layer whose tokens see no further back than the begin of their chunk."""

QUERY_KEY_VALUE: Roles = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
}
ATTENTION: Roles = {**QUERY_KEY_VALUE, "self_attn.o_proj": "rowwise"}
WIDTH_NORMS: Roles = {"self_attn.q_norm": "width_norm", "self_attn.k_norm": "width_norm"}
FEED_FORWARD: Roles = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
UNGATED_FEED_FORWARD: Roles = {"mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
PACKED_FEED_FORWARD: Roles = {"mlp.gate_up_proj": "halves", "mlp.down_proj": "rowwise"}
DENSE: Roles = {**ATTENTION, **FEED_FORWARD}
EXPERTS: Roles = {"mlp.experts": "experts"}


def shared(name: str) -> Roles:
    """The roles of an expert `name` that every token goes through."""
    return {
        f"mlp.{name}.gate_proj": "colwise",
        f"mlp.{name}.up_proj": "colwise",
        f"mlp.{name}.down_proj": "rowwise",
    }


QWEN_EXPERTS = (
    "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.{}.up_proj.weight",
    "mlp.experts.{}.down_proj.weight",
)
MIXTRAL_EXPERTS = Experts(
    (
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
        "block_sparse_moe.experts.{}.w2.weight",
    ),
    count="num_local_experts",
)
IN_BLOCK_SPARSE_MOE = ((".mlp.", ".block_sparse_moe."),)

SIZES = ("rms_norm_eps", "tie_word_embeddings", "head_dim")
GATED = (*SIZES, "intermediate_size", "hidden_act")
WITH_BIAS = (*GATED, "attention_bias")
WITH_BIASES = (*WITH_BIAS, "mlp_bias")
WINDOWS = ("sliding_window", "layer_types")
SWITCHED_WINDOWS = ("use_sliding_window", "max_window_layers", *WINDOWS)
SPARSE_LAYERS = ("decoder_sparse_step", "mlp_only_layers", "norm_topk_prob")


OMITTED = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
"""Fields that files of Google's models with images leave out."""


def all_but_every(period: int) -> Callable[[Fields, int], bool]:
    return lambda fields, layer: (layer + 1) % period != 0


def all_but_every_pattern(fields: Fields, layer: int) -> bool:
    return (layer + 1) % fields["sliding_window_pattern"] != 0


def from_max_window(fields: Fields, layer: int) -> bool:
    return layer >= fields["max_window_layers"]
