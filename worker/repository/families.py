"""The table of model types that are served, with the facts that are needed before any process is spawned.

The parity tests cover each type: its greedy tokens equal those of transformers in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.formats.recurrence import DELTA_RULE, MAMBA, SHORT_CONVOLUTION
from worker.formats.roles import Roles


@dataclass(frozen=True)
class Family:
    """The names and numbers of a model type that tensor parallelism needs.

    `kv_heads` is transformers' default where config.json has none (None: as many as query heads). `experts` names the
    config field with the number of experts, `expert_keys` the tensors of one expert on disk (gate, up, down; `{}` is
    its number), or as they are read where `together`, with the experts of a layer in one tensor; both are None for a
    dense model. `gate_above_up` says that the experts of a layer may be in one tensor with the outputs of gate before
    those of up, and inputs last: `stored_experts` are the names of these tensors. `may_lack_experts` says that
    a model may have 0 experts, and is dense then. `chosen_experts` names the field with the number of experts of
    a token, `experts_switch` the one that says if a model of the type has experts at all. `heads_by_layer` says that
    layers may have key-value heads of other width and number than the model's fields say, or those of an earlier layer.
    `renamed` maps parts of transformers' parameter names to those on disk.
    """

    roles: Roles
    kv_heads: int | None = None
    experts: str | None = None
    expert_keys: tuple[str, str, str] | None = None
    together: bool = False
    chosen_experts: str = "num_experts_per_tok"
    gate_above_up: bool = False
    stored_experts: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    experts_switch: str | None = None
    may_lack_experts: bool = False
    heads_by_layer: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    recurrent: str | None = None
    """The kind of the recurrent layers (formats/recurrence.py); None for a type without."""

    def has_experts(self, config: Mapping[str, object]) -> bool:
        """True if a model of this config.json has experts."""
        return self.experts is not None and (self.experts_switch is None or bool(config.get(self.experts_switch)))


_QUERY_KEY_VALUE: Roles = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
}
_ATTENTION: Roles = {**_QUERY_KEY_VALUE, "self_attn.o_proj": "rowwise"}
_WIDTH_NORMS: Roles = {"self_attn.q_norm": "width_norm", "self_attn.k_norm": "width_norm"}
_FEED_FORWARD: Roles = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
_PACKED_FEED_FORWARD: Roles = {"mlp.gate_up_proj": "halves", "mlp.down_proj": "rowwise"}
_NUMBERED_FEED_FORWARD: Roles = {
    "feed_forward.w1": "colwise",
    "feed_forward.w3": "colwise",
    "feed_forward.w2": "rowwise",
}
_EXPERTS: Roles = {"mlp.experts": "experts"}
_DENSE: Roles = {**_ATTENTION, **_FEED_FORWARD}
_RECURRENT_HEADS: Roles = {
    "linear_attn.conv1d": "regions",
    "linear_attn.A_log": "colwise",
    "linear_attn.dt_bias": "colwise",
    "linear_attn.out_proj": "rowwise",
}
_DELTA: Roles = {
    **_RECURRENT_HEADS,
    "linear_attn.in_proj_qkv": "regions",
    "linear_attn.in_proj_z": "colwise",
    "linear_attn.in_proj_b": "colwise",
    "linear_attn.in_proj_a": "colwise",
}
_DELTA_BY_HEAD: Roles = {
    **_RECURRENT_HEADS,
    "linear_attn.in_proj_qkvz": "colwise",
    "linear_attn.in_proj_ba": "colwise",
}
_CONVOLUTION: Roles = {"conv.in_proj": "regions", "conv.conv": "colwise", "conv.out_proj": "rowwise"}
_MAMBA: Roles = {
    "mamba.in_proj": "mamba",
    "mamba.conv1d": "mamba",
    "mamba.A_log": "colwise",
    "mamba.D": "colwise",
    "mamba.dt_bias": "colwise",
    "mamba.norm": "colwise",
    "mamba.out_proj": "rowwise",
}
_GRANITE_FEED_FORWARD: Roles = {"shared_mlp.input_linear": "halves", "shared_mlp.output_linear": "rowwise"}


def _shared(name: str) -> Roles:
    """The roles of an expert `name` that every token goes through."""
    return {
        f"mlp.{name}.gate_proj": "colwise",
        f"mlp.{name}.up_proj": "colwise",
        f"mlp.{name}.down_proj": "rowwise",
    }


_QWEN_EXPERTS = (
    "mlp.experts.{}.gate_proj.weight",
    "mlp.experts.{}.up_proj.weight",
    "mlp.experts.{}.down_proj.weight",
)
_MIXTRAL_EXPERTS = (
    "block_sparse_moe.experts.{}.w1.weight",
    "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)

FAMILIES: dict[str, Family] = {
    "apertus": Family({**_ATTENTION, "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}),
    "arcee": Family({**_ATTENTION, "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}),
    "cohere": Family({**_DENSE, "self_attn.q_norm": "colwise", "self_attn.k_norm": "colwise"}),
    "cohere2": Family(_DENSE),
    "ernie4_5": Family(_DENSE, kv_heads=2),
    "exaone4": Family(_DENSE, kv_heads=32),
    "gemma": Family(_DENSE, kv_heads=16),
    "gemma2": Family(_DENSE, kv_heads=4),
    "gemma3_text": Family(_DENSE, kv_heads=4),
    "gemma4_text": Family(
        {**_DENSE, "experts": "experts"},
        kv_heads=4,
        experts="num_experts",
        expert_keys=(
            "experts.{}.gate_proj.weight",
            "experts.{}.up_proj.weight",
            "experts.{}.down_proj.weight",
        ),
        chosen_experts="top_k_experts",
        gate_above_up=True,
        experts_switch="enable_moe_block",
        heads_by_layer=True,
    ),
    "glm": Family({**_ATTENTION, **_PACKED_FEED_FORWARD}, kv_heads=2),
    "glm4": Family({**_ATTENTION, **_PACKED_FEED_FORWARD}, kv_heads=2),
    "glm4_moe": Family(
        {**_DENSE, **_EXPERTS, **_shared("shared_experts")},
        kv_heads=8,
        experts="n_routed_experts",
        expert_keys=_QWEN_EXPERTS,
    ),
    "gpt_oss": Family(
        {**_ATTENTION, **_EXPERTS, "self_attn.sinks": "colwise"},
        kv_heads=8,
        experts="num_local_experts",
        expert_keys=_QWEN_EXPERTS,
        together=True,
    ),
    "granite": Family(_DENSE),
    "granitemoehybrid": Family(
        {**_ATTENTION, **_MAMBA, **_GRANITE_FEED_FORWARD, "block_sparse_moe.experts": "experts"},
        experts="num_local_experts",
        expert_keys=(
            "block_sparse_moe.experts.{}.gate_proj.weight",
            "block_sparse_moe.experts.{}.up_proj.weight",
            "block_sparse_moe.experts.{}.down_proj.weight",
        ),
        gate_above_up=True,
        stored_experts=("input_linear.weight", "output_linear.weight"),
        may_lack_experts=True,
        renamed=((".router.", ".router.layer."),),
        recurrent=MAMBA,
    ),
    "hunyuan_v1_dense": Family(_DENSE),
    "internlm3": Family(_DENSE, kv_heads=2),
    "lfm2": Family(
        {**_QUERY_KEY_VALUE, "self_attn.out_proj": "rowwise", **_CONVOLUTION, **_NUMBERED_FEED_FORWARD},
        kv_heads=8,
        recurrent=SHORT_CONVOLUTION,
    ),
    "llama": Family(_DENSE),
    "minimax_m2": Family(
        {**_ATTENTION, **_WIDTH_NORMS, **_EXPERTS},
        kv_heads=8,
        experts="num_local_experts",
        expert_keys=_MIXTRAL_EXPERTS,
        renamed=((".mlp.", ".block_sparse_moe."),),
    ),
    "ministral": Family(_DENSE, kv_heads=8),
    "ministral3": Family(_DENSE, kv_heads=8),
    "mistral": Family(_DENSE, kv_heads=8),
    "mixtral": Family(
        {**_ATTENTION, **_EXPERTS},
        kv_heads=8,
        experts="num_local_experts",
        expert_keys=_MIXTRAL_EXPERTS,
        renamed=((".mlp.", ".block_sparse_moe."),),
    ),
    "olmo2": Family({**_DENSE, **_WIDTH_NORMS}),
    "olmo3": Family({**_DENSE, **_WIDTH_NORMS}),
    "phi": Family({**_QUERY_KEY_VALUE, "self_attn.dense": "rowwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}),
    "phi3": Family(
        {"self_attn.qkv_proj": "query_key_value", "self_attn.o_proj": "rowwise", **_PACKED_FEED_FORWARD},
    ),
    "qwen2": Family(_DENSE, kv_heads=32),
    "qwen2_moe": Family(
        {**_DENSE, **_EXPERTS, **_shared("shared_expert")},
        kv_heads=16,
        experts="num_experts",
        expert_keys=_QWEN_EXPERTS,
    ),
    "qwen3": Family(_DENSE, kv_heads=32),
    "qwen3_5_moe_text": Family(
        {**_ATTENTION, **_DELTA, **_EXPERTS, **_shared("shared_expert")},
        kv_heads=2,
        experts="num_experts",
        expert_keys=_QWEN_EXPERTS,
        gate_above_up=True,
        recurrent=DELTA_RULE,
    ),
    "qwen3_5_text": Family({**_DENSE, **_DELTA}, kv_heads=4, recurrent=DELTA_RULE),
    "qwen3_moe": Family({**_DENSE, **_EXPERTS}, kv_heads=4, experts="num_experts", expert_keys=_QWEN_EXPERTS),
    "qwen3_next": Family(
        {**_DENSE, **_DELTA_BY_HEAD, **_EXPERTS, **_shared("shared_expert")},
        kv_heads=2,
        experts="num_experts",
        expert_keys=_QWEN_EXPERTS,
        recurrent=DELTA_RULE,
    ),
    "seed_oss": Family(_DENSE, kv_heads=8),
    "smollm3": Family(_DENSE, kv_heads=4),
    "starcoder2": Family({**_ATTENTION, "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"}, kv_heads=2),
}

_MLA = "its attention keeps compressed keys and values (MLA)"
_RECURRENT = "its layers keep a recurrent state"
_CHUNKED = "its attention ends at the borders of chunks"
_ALTERED = "its layers predict and correct several hidden states (AltUp)"
_ENCODER = "it is no decoder that generates text"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3"), _MLA),
    **dict.fromkeys(("kimi_linear", "lfm2_moe", "minimax", "mamba", "mamba2", "falcon_mamba"), _RECURRENT),
    **dict.fromkeys(("bamba", "falcon_h1", "jamba", "nemotron_h", "zamba2"), _RECURRENT),
    **dict.fromkeys(("llama4", "llama4_text"), _CHUNKED),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _ALTERED),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "deberta-v2", "t5"), _ENCODER),
}
"""Well-known model types that are not served, with the reason."""

INTERLEAVED = {"cohere", "cohere2", "ernie4_5", "glm", "glm4"}
"""Families whose rotary pairs are neighbours, and not half a head apart."""

BATCHABLE_ROPE = {"default", "linear", "llama3", "yarn"}
"""Rotary embeddings that are served. `dynamic` and `longrope` depend on the batch's longest sequence: one user's length
would change another's answer."""

OWN_ROPE = {"gemma4_text": {"proportional"}}
"""More rotary embeddings that are served, by model type."""

LONGROPE_NAMES = {"phi3": {"su", "yarn"}}
"""Other names of `longrope` in the files of a model type."""
