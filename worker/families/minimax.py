from dataclasses import replace
from typing import Any

from worker.families.family import Family
from worker.families.gguf import MIXTRAL_LAYER_NAMES, Gguf, Metadata, local_experts_described
from worker.families.parts import ATTENTION, EXPERTS, GATED, IN_BLOCK_SPARSE_MOE, MIXTRAL_EXPERTS, WIDTH_NORMS

_GGUF_NAMES = MIXTRAL_LAYER_NAMES | {"block_sparse_moe.e_score_correction_bias": "exp_probs_b.bias"}


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "intermediate_size": model.whole("minimax-m2.expert_feed_forward_length"),
        **local_experts_described(model),
        "rotary_dim": model.whole("minimax-m2.rope.dimension_count", common["head_dim"]),
    }


FAMILIES = [
    Family(
        "minimax_m2",
        {**ATTENTION, **WIDTH_NORMS, **EXPERTS},
        (*GATED, "num_local_experts", "num_experts_per_tok", "rotary_dim"),
        aliases={"num_local_experts": "num_experts"},
        own_defaults={"rotary_dim": None},
        head_norms="all_heads",
        experts=replace(MIXTRAL_EXPERTS, sigmoid_scores=True, correction="mixture"),
        stored_names=IN_BLOCK_SPARSE_MOE,
        gguf=(Gguf("minimax-m2", _from_gguf, _GGUF_NAMES, partial=True),),
    )
]
