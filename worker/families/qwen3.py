from __future__ import annotations

from typing import Any

from worker.families.family import Experts, Family, Images, TextPart
from worker.families.gguf import EXPERT_LAYER_NAMES, LAYER_NAMES, Gguf, Metadata, experts_described
from worker.families.parts import (
    DENSE,
    EXPERTS,
    QWEN_EXPERTS,
    SPARSE_LAYERS,
    SWITCHED_WINDOWS,
    WITH_BIAS,
    from_max_window,
)

_WINDOWS = ("use_sliding_window", "sliding_window")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
    }


def _experts_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    # As llama.cpp has it; the file does not say.
    always = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return _from_gguf(model, common) | experts_described(model) | always


FAMILIES = [
    Family(
        "qwen3",
        DENSE,
        (*WITH_BIAS, *SWITCHED_WINDOWS),
        head_norms="each_head",
        slides=from_max_window,
        gguf=(Gguf("qwen3", _from_gguf, LAYER_NAMES),),
        pooling="causal",
    ),
    Family(
        "qwen3_moe",
        {**DENSE, **EXPERTS},
        (*WITH_BIAS, *_WINDOWS, *SPARSE_LAYERS, *_EXPERTS),
        aliases={"num_experts": "num_local_experts"},
        head_norms="each_head",
        experts=Experts(
            QWEN_EXPERTS,
            stored_above=("experts.gate_up_proj", "experts.down_proj"),  # of qwen3_vl_moe
            any_order=True,
        ),
        gguf=(Gguf("qwen3moe", _experts_from_gguf, EXPERT_LAYER_NAMES),),
    ),
]

_IMAGES = Images("qwen", token=151655, sections=(24, 20, 20), deepstack=(8, 16, 24))

TEXT_PARTS = [
    TextPart("qwen3_vl", "qwen3", tied=False, images=_IMAGES),
    TextPart("qwen3_vl_moe", "qwen3_moe", tied=False, always={"norm_topk_prob": True}, images=_IMAGES),
]
