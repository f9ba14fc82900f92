"""The table of model types that are served, with the facts that are needed before any process is spawned.

The parity tests cover each type: its greedy tokens equal those of transformers in float64.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """The names and numbers of a model type that tensor parallelism needs.

    `kv_heads` is transformers' default where config.json has none (None: as many as query heads). `experts` names the
    config field with the number of experts, `expert_keys` the tensors of one expert on disk (gate, up, down; `{}` is
    its number); both are None for a dense model. `renamed` maps parts of transformers' parameter names to those on
    disk.
    """

    kv_heads: int | None = None
    experts: str | None = None
    expert_keys: tuple[str, str, str] | None = None
    renamed: tuple[tuple[str, str], ...] = ()


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
    "cohere2": Family(kv_heads=64),
    "gemma2": Family(kv_heads=4),
    "gemma3_text": Family(kv_heads=4),
    "granite": Family(),
    "llama": Family(),
    "mistral": Family(kv_heads=8),
    "mixtral": Family(
        kv_heads=8,
        experts="num_local_experts",
        expert_keys=_MIXTRAL_EXPERTS,
        renamed=((".mlp.gate.", ".block_sparse_moe.gate."),),
    ),
    "qwen2": Family(kv_heads=32),
    "qwen3": Family(kv_heads=32),
    "qwen3_moe": Family(kv_heads=4, experts="num_experts", expert_keys=_QWEN_EXPERTS),
    "smollm3": Family(kv_heads=4),
    "starcoder2": Family(kv_heads=2),
}

TEXT_PART: dict[str, str] = {"gemma3": "gemma3_text", "mistral3": "mistral", "qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3"}
"""Multimodal types whose text part alone would be served, so that their refusal can say so."""

UNBATCHABLE_ROPE = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the batch's longest sequence: one user's length would change another's answer."""
