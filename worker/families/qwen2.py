from __future__ import annotations

from typing import Any

from worker.families.family import Experts, Family, TextPart
from worker.families.gguf import LAYER_NAMES, Gguf, Metadata
from worker.families.parts import (
    DENSE,
    EXPERTS,
    GATED,
    QWEN_EXPERTS,
    SPARSE_LAYERS,
    SWITCHED_WINDOWS,
    from_max_window,
    shared,
)

_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


FAMILIES = [
    Family(
        "qwen2",
        DENSE,
        (*GATED, *SWITCHED_WINDOWS),
        query_key_value_bias=True,
        slides=from_max_window,
        gguf=(Gguf("qwen2", _from_gguf, LAYER_NAMES),),
    ),
    Family(
        "qwen2_moe",
        {**DENSE, **EXPERTS, **shared("shared_expert")},
        (*GATED, *SWITCHED_WINDOWS, *SPARSE_LAYERS, *_EXPERTS, "qkv_bias"),
        slides=lambda fields, layer: layer % 2 == 0 and layer < fields["max_window_layers"],
        experts=Experts(QWEN_EXPERTS),
    ),
]

TEXT_PARTS = [TextPart("qwen2_5_vl", "qwen2", tied=False)]
