"""qwen3_next and qwen3_5: layers with the gated delta rule beside attention whose output has a gate."""

from __future__ import annotations

from typing import Any

from worker.families.family import Experts, Family, Images, Roles, TextPart
from worker.families.gguf import WITH_SHARED_EXPERT, Gguf, Metadata, experts_described
from worker.families.parts import ATTENTION, DENSE, EXPERTS, QWEN_EXPERTS, SIZES, SPARSE_LAYERS, gated
from worker.families.recurrence import FULL, LINEAR, TILED, delta_rule_of

_HEADS: Roles = {
    "linear_attn.conv1d": "regions",
    "linear_attn.A_log": "colwise",
    "linear_attn.dt_bias": "colwise",
    "linear_attn.out_proj": "rowwise",
}
_DELTA: Roles = {
    **_HEADS,
    "linear_attn.in_proj_qkv": "regions",
    "linear_attn.in_proj_z": "colwise",
    "linear_attn.in_proj_b": "colwise",
    "linear_attn.in_proj_a": "colwise",
}
_DELTA_BY_HEAD: Roles = {
    **_HEADS,
    "linear_attn.in_proj_qkvz": "colwise",
    "linear_attn.in_proj_ba": "colwise",
}
_SPARSE: Roles = {**EXPERTS, **gated("mlp.shared_expert")}

_FIELDS = (*SIZES, "hidden_act", "attention_bias")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    name = model.architecture
    width = common["head_dim"]
    layers = common["num_hidden_layers"]
    rotated = model.whole(f"{name}.rope.dimension_count", width)
    value_heads = model.whole(f"{name}.ssm.time_step_rank")
    inner = model.whole(f"{name}.ssm.inner_size")
    if inner % value_heads:
        raise model.wrong(f"{name}.ssm.inner_size", inner, f"a multiple of the {value_heads} value heads is needed")
    if rotated > width or rotated % 2:
        raise model.wrong(f"{name}.rope.dimension_count", rotated, f"an even number up to {width} is needed")
    recurrent = f"{name}.attention.recurrent_layers"
    kinds = None
    if recurrent in model.fields:
        kinds = [LINEAR if is_recurrent else FULL for is_recurrent in model.array(recurrent).numbers()[:layers]]
    return {
        "hidden_act": "silu",
        "rope_parameters": common["rope_parameters"] | {"partial_rotary_factor": rotated / width},
        "linear_conv_kernel_dim": model.whole(f"{name}.ssm.conv_kernel"),
        "linear_key_head_dim": model.whole(f"{name}.ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_num_key_heads": model.whole(f"{name}.ssm.group_count"),
        "linear_num_value_heads": value_heads,
        TILED: True,
        "full_attention_interval": model.whole(f"{name}.full_attention_interval", 4),
        "layer_types": kinds,
    }


def _experts_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    inner = model.whole(f"{model.architecture}.expert_shared_feed_forward_length")
    return _from_gguf(model, common) | experts_described(model) | {"shared_expert_intermediate_size": inner}


def _next_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    # Files hold its projections as Qwen3.5 has them, and the value heads of a key head side by side.
    return _experts_from_gguf(model, common) | {TILED: False}


_GGUF_NAMES = WITH_SHARED_EXPERT | {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
}
_NEXT_GGUF_NAMES = _GGUF_NAMES | {"linear_attn.in_proj_b": "ssm_ba", "linear_attn.in_proj_a": "ssm_ba"}
"""Both projections are one tensor: see `gguf.RATES`."""


def _hybrid(
    model_type: str, roles: Roles, fields: tuple[str, ...], experts: Experts | None, gguf: tuple[Gguf, ...] = ()
) -> Family:
    return Family(
        model_type,
        roles,
        (*_FIELDS, *fields),
        norm_offset=True,
        head_norms="each_head",
        output_gate=True,
        experts=experts,
        recurrent=delta_rule_of,
        gguf=gguf,
    )


FAMILIES = [
    _hybrid(
        "qwen3_5_text",
        {**DENSE, **_DELTA},
        ("intermediate_size",),
        None,
        (Gguf("qwen35", _from_gguf, _GGUF_NAMES),),
    ),
    _hybrid(
        "qwen3_5_moe_text",
        {**ATTENTION, **_DELTA, **_SPARSE},
        _EXPERTS,
        Experts(QWEN_EXPERTS, stored_above=("experts.gate_up_proj", "experts.down_proj")),
        (
            Gguf("qwen35moe", _experts_from_gguf, _GGUF_NAMES),
            Gguf("qwen3next", _next_from_gguf, _NEXT_GGUF_NAMES),
        ),
    ),
    _hybrid(
        "qwen3_next",
        {**DENSE, **_DELTA_BY_HEAD, **_SPARSE},
        ("intermediate_size", *SPARSE_LAYERS, *_EXPERTS),
        Experts(QWEN_EXPERTS),
    ),
]

_IMAGES = Images("qwen", token=248056, sections=(11, 11, 10))

TEXT_PARTS = [
    TextPart("qwen3_5", "qwen3_5_text", tied=False, images=_IMAGES),
    TextPart("qwen3_5_moe", "qwen3_5_moe_text", tied=False, images=_IMAGES),
]
