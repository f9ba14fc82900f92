"""qwen2 and qwen3. qwen3_5 has recurrent layers, and a file of its own."""

from __future__ import annotations

from typing import Any

from worker.families.family import Experts, Family, Images, TextPart
from worker.families.gguf import (
    EXPERT_LAYER_NAMES,
    LAYER_NAMES,
    WITH_SHARED_EXPERT,
    Gguf,
    Metadata,
    experts_described,
    has_query_bias,
)
from worker.families.parts import (
    DENSE,
    EXPERTS,
    GATED,
    QWEN_EXPERTS,
    SPARSE_LAYERS,
    SWITCHED_WINDOWS,
    WITH_BIAS,
    from_max_window,
    gated,
)

_WINDOWS = ("use_sliding_window", "sliding_window")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def _qwen2_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen2_experts_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    # As llama.cpp has it; the file does not say.
    always = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": True}
    inner = model.whole("qwen2moe.expert_shared_feed_forward_length")
    return (
        _qwen2_from_gguf(model, common) | experts_described(model) | always | {"shared_expert_intermediate_size": inner}
    )


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return _qwen2_from_gguf(model, common) | {"attention_bias": has_query_bias(model)}


def _experts_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    # As llama.cpp has it; the file does not say.
    always = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return _from_gguf(model, common) | experts_described(model) | always


FAMILIES = [
    Family(
        "qwen2",
        DENSE,
        (*GATED, *SWITCHED_WINDOWS),
        query_key_value_bias=True,
        slides=from_max_window,
        gguf=(Gguf("qwen2", _qwen2_from_gguf, LAYER_NAMES),),
    ),
    Family(
        "qwen2_moe",
        {**DENSE, **EXPERTS, **gated("mlp.shared_expert")},
        (*GATED, *SWITCHED_WINDOWS, *SPARSE_LAYERS, *_EXPERTS, "shared_expert_intermediate_size", "qkv_bias"),
        slides=lambda fields, layer: layer % 2 == 0 and layer < fields["max_window_layers"],
        experts=Experts(QWEN_EXPERTS),
        gguf=(Gguf("qwen2moe", _qwen2_experts_from_gguf, WITH_SHARED_EXPERT),),
    ),
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
    TextPart("qwen2_5_vl", "qwen2", tied=False),
    TextPart("qwen3_vl", "qwen3", tied=False, images=_IMAGES),
    TextPart("qwen3_vl_moe", "qwen3_moe", tied=False, always={"norm_topk_prob": True}, images=_IMAGES),
]
