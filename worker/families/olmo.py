from typing import Any

from worker.families.family import ONLY_AFTER, Experts, Family
from worker.families.gguf import AROUND_LAYER_NAMES, Gguf, Metadata, has_query_bias
from worker.families.parts import (
    ATTENTION,
    DENSE,
    EXPERTS,
    QWEN_EXPERTS,
    SLIDING,
    WIDTH_NORMS,
    WINDOWS,
    WITH_BIAS,
    all_but_every,
)
from worker.families.recurrence import FULL


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "attention_bias": has_query_bias(model)}


FAMILIES = [
    Family(
        "olmo2",
        {**DENSE, **WIDTH_NORMS},
        WITH_BIAS,
        norms=ONLY_AFTER,
        head_norms="all_heads",
        gguf=(Gguf("olmo2", _from_gguf, AROUND_LAYER_NAMES),),
    ),
    Family(
        "olmo3",
        {**DENSE, **WIDTH_NORMS},
        (*WITH_BIAS, *WINDOWS),
        norms=ONLY_AFTER,
        head_norms="all_heads",
        rope_by_kind={FULL: "rope_theta", SLIDING: None},
        slides=all_but_every(4),
    ),
    Family(
        "olmoe",
        {**ATTENTION, **WIDTH_NORMS, **EXPERTS},
        (*WITH_BIAS, "num_experts", "num_experts_per_tok", "norm_topk_prob"),
        aliases={"num_experts": "num_local_experts"},
        torch_numbers=("clip_qkv",),
        head_norms="all_heads",
        head_norms_by_hidden_size=True,
        experts=Experts(QWEN_EXPERTS),
    ),
]
