from __future__ import annotations

from typing import Any

from worker.families.family import Experts, Family, TextPart
from worker.families.gguf import EXPERT_LAYER_NAMES, LAYER_NAMES, Gguf, Metadata, experts_described
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


def _experts_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    # As llama.cpp has it; the file does not say.
    always = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": True}
    inner = model.whole("qwen2moe.expert_shared_feed_forward_length")
    return _from_gguf(model, common) | experts_described(model) | always | {"shared_expert_intermediate_size": inner}


_MOE_NAMES = EXPERT_LAYER_NAMES | {
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}

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
        gguf=(Gguf("qwen2moe", _experts_from_gguf, _MOE_NAMES),),
    ),
]

TEXT_PARTS = [TextPart("qwen2_5_vl", "qwen2", tied=False)]
