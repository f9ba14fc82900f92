"""llama, and types that differ from it by defaults, names of fields or a switch."""

from __future__ import annotations

from typing import Any

from worker.families.family import Experts, Family, Fields
from worker.families.gguf import (
    EXPERT_LAYER_NAMES,
    LAYER_NAMES,
    ROUTED_LAYER_NAMES,
    Gguf,
    Metadata,
    biases_described,
    gated_names,
    has_query_bias,
    layers_described,
)
from worker.families.parts import (
    ATTENTION,
    DENSE,
    EXPERTS,
    GATED,
    QWEN_EXPERTS,
    UNGATED_FEED_FORWARD,
    WINDOWS,
    WITH_BIAS,
    WITH_BIASES,
    gated,
)
from worker.families.recurrence import FULL


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", **biases_described(model)}


def _arcee_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "relu2", **biases_described(model)}


def _ernie_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    biases = biases_described(model)
    return {"hidden_act": "silu", "use_bias": biases["attention_bias"], **biases}


def _seed_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return _from_gguf(model, common) | {"attention_out_bias": "blk.0.attn_output.bias" in model.tensors}


_WITHOUT_ROPE = 4
"""Every fourth layer of smollm3 has no rotary embedding; a file does not say so."""


def _smollm3_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    layers = layers_described(model, common["num_hidden_layers"])
    return _from_gguf(model, common) | {
        "no_rope_layers": [int((layer + 1) % _WITHOUT_ROPE != 0) for layer in layers],
        "no_rope_layer_interval": _WITHOUT_ROPE,
        "use_sliding_window": False,
        "sliding_window": None,
        "layer_types": [FULL for _ in layers],
    }


def _has_rope(fields: Fields, layer: int, kind: str = FULL) -> bool:
    turns = fields["no_rope_layers"]
    return bool(turns[layer]) if turns is not None else (layer + 1) % fields["no_rope_layer_interval"] != 0


def _is_sparse_ernie(fields: Fields, layer: int) -> bool:
    last = fields["moe_layer_end_index"]
    return (
        fields["moe_layer_start_index"] <= layer
        and (last == -1 or layer <= last)
        and (layer + 1) % fields["moe_layer_interval"] == 0
    )


def _ernie_moe_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    name = "ernie4_5-moe"
    return _ernie_from_gguf(model, common) | {
        "moe_num_experts": model.whole(f"{name}.expert_count"),
        "moe_k": model.whole(f"{name}.expert_used_count"),
        "moe_intermediate_size": model.whole(f"{name}.expert_feed_forward_length"),
        "moe_num_shared_experts": model.whole(f"{name}.expert_shared_count"),
        "moe_layer_start_index": model.whole(f"{name}.leading_dense_block_count", 0, least=0),
        "moe_layer_end_index": -1,
        "moe_layer_interval": model.whole(f"{name}.interleave_moe_layer_step", 1),
    }


def _hunyuan_moe_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": has_query_bias(model),
        "intermediate_size": model.whole("hunyuan-moe.expert_feed_forward_length"),
        "num_experts": model.whole("hunyuan-moe.expert_count"),
        "moe_topk": model.whole("hunyuan-moe.expert_used_count"),
    }


_ERNIE_MOE_NAMES = ROUTED_LAYER_NAMES | {"mlp.moe_statics.e_score_correction_bias": "exp_probs_b.bias"}
_HUNYUAN_MOE_NAMES = EXPERT_LAYER_NAMES | {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate.wg": "ffn_gate_inp",
    **gated_names("mlp.shared_mlp", "_shexp"),
}
_UNGATED_NAMES = {module: name for module, name in LAYER_NAMES.items() if module != "mlp.gate_proj"}
_HUNYUAN_NAMES = LAYER_NAMES | {
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
_SEED_NAMES = LAYER_NAMES | {"post_attention_layernorm": "post_attention_norm"}

FAMILIES = [
    Family(
        "arcee",
        {**ATTENTION, **UNGATED_FEED_FORWARD},
        WITH_BIASES,
        activations={"relu2": "relu2"},
        gguf=(Gguf("arcee", _arcee_from_gguf, _UNGATED_NAMES, permuted=True),),
    ),
    Family(
        "ernie4_5",
        DENSE,
        (*GATED, "use_bias"),
        rope_neighbours=True,
        gguf=(Gguf("ernie4_5", _ernie_from_gguf, LAYER_NAMES),),
    ),
    Family(
        "ernie4_5_moe",
        {**DENSE, **EXPERTS, **gated("mlp.shared_experts")},
        (
            *(*GATED, "use_bias", "moe_num_experts", "moe_k", "moe_intermediate_size", "moe_num_shared_experts"),
            *("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval", "moe_norm_min"),
        ),
        aliases={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        rope_neighbours=True,
        head_bias="use_bias",
        experts=Experts(
            QWEN_EXPERTS,
            count="moe_num_experts",
            chosen="moe_k",
            layers=_is_sparse_ernie,
            shared="moe_num_shared_experts",
            correction="statics",
        ),
        stored_names=((".gate.moe_statics.", ".moe_statics."),),
        gguf=(Gguf("ernie4_5-moe", _ernie_moe_from_gguf, _ERNIE_MOE_NAMES),),
    ),
    Family(
        "hunyuan_v1_dense",
        DENSE,
        WITH_BIAS,
        fixed_alpha=True,
        head_norms="each_turned_head",
        gguf=(Gguf("hunyuan-dense", _from_gguf, _HUNYUAN_NAMES),),
    ),
    Family(
        "hunyuan_v1_moe",
        {**ATTENTION, **EXPERTS, **gated("mlp.shared_mlp")},
        (*WITH_BIAS, "num_experts", "moe_topk"),
        aliases={"moe_topk": "num_experts_per_tok", "num_experts": "num_local_experts"},
        one_for_all=frozenset({"moe_topk", "num_experts_per_tok", "moe_intermediate_size"}),
        fixed_alpha=True,
        head_norms="each_turned_head",
        experts=Experts(QWEN_EXPERTS, chosen="moe_topk"),
        native_names=((".mlp.gate.weight", ".mlp.gate.wg.weight"), (".mlp.shared_experts.", ".mlp.shared_mlp.")),
        gguf=(Gguf("hunyuan-moe", _hunyuan_moe_from_gguf, _HUNYUAN_MOE_NAMES),),
    ),
    Family("internlm3", DENSE, WITH_BIASES, aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"}),
    Family("llama", DENSE, WITH_BIASES, gguf=(Gguf("llama", _from_gguf, LAYER_NAMES, permuted=True),)),
    Family(
        "seed_oss",
        DENSE,
        (*WITH_BIASES, "attention_out_bias"),
        gguf=(Gguf("seed_oss", _seed_from_gguf, _SEED_NAMES),),
    ),
    Family(
        "smollm3",
        DENSE,
        (*WITH_BIASES, *WINDOWS, "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"),
        slides=lambda fields, layer: not _has_rope(fields, layer),
        rotates=_has_rope,
        gguf=(Gguf("smollm3", _smollm3_from_gguf, LAYER_NAMES, permuted=True),),
    ),
]
