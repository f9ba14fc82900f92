from __future__ import annotations

from typing import Any

from worker.families.family import Experts, Family
from worker.families.gguf import EXPERT_LAYER_NAMES, Gguf, Metadata, layers_described, local_experts_described
from worker.families.parts import ATTENTION, EXPERTS, QWEN_EXPERTS, SLIDING, WINDOWS, WITH_BIAS, all_but_every
from worker.families.recurrence import FULL


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    layers = layers_described(model, common["num_hidden_layers"])
    return {
        "hidden_act": "silu",
        "intermediate_size": model.whole("gpt-oss.expert_feed_forward_length"),
        **local_experts_described(model),
        "sliding_window": model.whole("gpt-oss.attention.sliding_window"),
        "layer_types": [FULL if layer % 2 else SLIDING for layer in layers],
        "attention_bias": True,
        # The files say none of these; they are those of the published models.
        "swiglu_limit": 7.0,
        "rope_parameters": common["rope_parameters"] | {"truncate": False},
    }


_GGUF_NAMES = EXPERT_LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "self_attn.sinks": "attn_sinks.weight",
}

FAMILIES = [
    Family(
        "gpt_oss",
        {**ATTENTION, **EXPERTS, "self_attn.sinks": "colwise"},
        (*WITH_BIAS, *WINDOWS, "num_local_experts", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit"),
        aliases={"num_local_experts": "num_experts"},
        slides=all_but_every(2),
        theta_beside_rope=True,
        experts=Experts(QWEN_EXPERTS, count="num_local_experts", together=True, router="router"),
        gguf=(Gguf("gpt-oss", _from_gguf, _GGUF_NAMES),),
    )
]
