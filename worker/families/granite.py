from dataclasses import replace
from typing import Any

from worker.families.family import Experts, Family, Roles
from worker.families.gguf import (
    LAYER_NAMES,
    MAMBA_NAMES,
    Gguf,
    Metadata,
    biases_described,
    gated_names,
    has_experts,
    local_experts_described,
    mamba_described,
)
from worker.families.parts import ATTENTION, DENSE, MAMBA, WITH_BIAS, WITH_BIASES
from worker.families.recurrence import mamba_of

_EXPERTS_ALONE: Roles = {"block_sparse_moe.experts": "experts"}
_FEED_FORWARD: Roles = {
    "shared_mlp.input_linear": "halves",
    "shared_mlp.output_linear": "rowwise",
    **_EXPERTS_ALONE,
}

_EXPERTS = Experts(
    (
        "block_sparse_moe.experts.{}.gate_proj.weight",
        "block_sparse_moe.experts.{}.up_proj.weight",
        "block_sparse_moe.experts.{}.down_proj.weight",
    ),
    count="num_local_experts",
    stored_above=("input_linear.weight", "output_linear.weight"),
    router="router",
)
_STORED_ROUTER = ((".router.", ".router.layer."),)
_NATIVE_NAMES = (
    (".mlp.experts", ".block_sparse_moe.experts"),
    (".mlp.router", ".block_sparse_moe.router"),
    (".mlp.shared_experts.gate_up_proj", ".shared_mlp.input_linear"),
    (".mlp.shared_experts.down_proj", ".shared_mlp.output_linear"),
    (".mlp.gate_up_proj", ".shared_mlp.input_linear"),
    (".mlp.down_proj", ".shared_mlp.output_linear"),
)
_COUNTS = ("num_local_experts", "num_experts_per_tok")

_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    name = model.architecture
    return {
        "hidden_act": "silu",
        **biases_described(model),
        "attention_multiplier": model.real(f"{name}.attention.scale"),
        "embedding_multiplier": model.real(f"{name}.embedding_scale", 1.0),
        "residual_multiplier": model.real(f"{name}.residual_scale", 1.0),
        "logits_scaling": model.real(f"{name}.logit_scale", 1.0),
    }


def _experts_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return _from_gguf(model, common) | {
        **local_experts_described(model),
    }


_MOE_NAMES = {
    **LAYER_NAMES,
    **gated_names("block_sparse_moe.experts", "_exps"),
    "block_sparse_moe.router.layer": "ffn_gate_inp",
}

_HYBRID_NAMES = {name: stored for name, stored in _MOE_NAMES.items() if not name.startswith("mlp.")} | MAMBA_NAMES


def _hybrid_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    taps, heads, inner, groups, state, conv_bias = mamba_described(model)
    layers = common["num_hidden_layers"]
    attending = model.array("granitehybrid.attention.head_count_kv").numbers()[:layers]
    rotates = model.flag("granitehybrid.rope.scaling.finetuned", False)
    return _from_gguf(model, common) | {
        "attention_bias": False,
        "layer_types": ["attention" if attends else "mamba" for attends in attending],
        "position_embedding_type": "rope" if rotates else "nope",
        "num_local_experts": model.whole("granitehybrid.expert_count", 0, least=0),
        "num_experts_per_tok": model.whole("granitehybrid.expert_used_count", 0, least=0),
        "shared_intermediate_size": model.whole("granitehybrid.expert_shared_feed_forward_length"),
        "mamba_d_conv": taps,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // common["hidden_size"],
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_conv_bias": conv_bias,
        "mamba_proj_bias": False,
    }


FAMILIES = [
    Family(
        "granite",
        DENSE,
        (*WITH_BIASES, *_MULTIPLIERS),
        gguf=(Gguf("granite", _from_gguf, LAYER_NAMES, permuted=True),),
    ),
    Family(
        "granitemoe",
        {**ATTENTION, **_EXPERTS_ALONE},
        (*WITH_BIAS, *_MULTIPLIERS, *_COUNTS),
        experts=_EXPERTS,
        stored_names=_STORED_ROUTER,
        native_names=_NATIVE_NAMES[:2],
        gguf=(Gguf("granitemoe", _experts_from_gguf, _MOE_NAMES, permuted=True),),
    ),
    Family(
        "granitemoeshared",
        {**ATTENTION, **_FEED_FORWARD},
        (*WITH_BIAS, *_MULTIPLIERS, *_COUNTS, "shared_intermediate_size"),
        experts=_EXPERTS,
        stored_names=_STORED_ROUTER,
        native_names=_NATIVE_NAMES,
    ),
    Family(
        "granitemoehybrid",
        {**ATTENTION, **MAMBA, **_FEED_FORWARD},
        (
            *WITH_BIAS,
            *_MULTIPLIERS,
            *(*_COUNTS, "shared_intermediate_size", "position_embedding_type"),
        ),
        activations={"silu": "silu", "swish": "silu"},
        rotates=lambda fields, layer, kind: fields["position_embedding_type"] == "rope",
        experts=replace(_EXPERTS, may_lack=True),
        recurrent=mamba_of,
        stored_names=_STORED_ROUTER,
        native_names=_NATIVE_NAMES,
        gguf=(
            Gguf(
                "granitehybrid",
                _hybrid_from_gguf,
                _HYBRID_NAMES | {"shared_mlp.output_linear": "ffn_down_shexp"},
                halves={"shared_mlp.input_linear.weight": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight")},
                when=has_experts,
                permuted=True,
            ),
            Gguf(
                "granitehybrid",
                _hybrid_from_gguf,
                _HYBRID_NAMES | {"shared_mlp.output_linear": "ffn_down"},
                halves={"shared_mlp.input_linear.weight": ("ffn_gate.weight", "ffn_up.weight")},
                permuted=True,
            ),
        ),
    ),
]
