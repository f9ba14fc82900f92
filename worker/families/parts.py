"""Parts of records that several families share: roles, names of experts, fields and windows."""

from __future__ import annotations

from collections.abc import Callable

from worker.families.family import Experts, Fields, Roles
from worker.families.gguf import PROJECTIONS

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


def gated(module: str, projections: tuple[str, str, str] = PROJECTIONS) -> Roles:
    """The roles of a feed-forward network with a gate."""
    gate, up, down = projections
    return {f"{module}.{gate}": "colwise", f"{module}.{up}": "colwise", f"{module}.{down}": "rowwise"}


FEED_FORWARD = gated("mlp")
UNGATED_FEED_FORWARD: Roles = {"mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
PACKED_FEED_FORWARD: Roles = {"mlp.gate_up_proj": "halves", "mlp.down_proj": "rowwise"}
DENSE: Roles = {**ATTENTION, **FEED_FORWARD}
EXPERTS: Roles = {"mlp.experts": "experts"}
MAMBA: Roles = {
    "mamba.in_proj": "mamba",
    "mamba.conv1d": "mamba",
    "mamba.A_log": "colwise",
    "mamba.D": "colwise",
    "mamba.dt_bias": "colwise",
    "mamba.norm": "colwise",
    "mamba.out_proj": "rowwise",
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
ROUTED_EXPERTS = Experts(QWEN_EXPERTS, count="n_routed_experts", sigmoid_scores=True, correction="router")
IN_BLOCK_SPARSE_MOE = ((".mlp.", ".block_sparse_moe."),)

SIZES = ("rms_norm_eps", "tie_word_embeddings", "head_dim")
GATED = (*SIZES, "intermediate_size", "hidden_act")
WITH_BIAS = (*GATED, "attention_bias")
WITH_BIASES = (*WITH_BIAS, "mlp_bias")
WINDOWS = ("sliding_window", "layer_types")
SWITCHED_WINDOWS = ("use_sliding_window", "max_window_layers", *WINDOWS)
ROUTING = ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob")
"""How a token's experts are chosen among groups of them."""
ROUTED = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", *ROUTING)
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
