"""Recurrent layers as llama.cpp's converter writes them to GGUF files, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_TOGETHER = "in_proj_qkvz.weight"

PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
QWEN3_NEXT_PARTS = PARTS | {"linear_attn.in_proj_ba": "ssm_ba"}
WHOLE = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}


def to_file(name: str, values: Floats, config: dict[str, Any]) -> Floats:
    """`values` of transformers' parameter `name` in a file's form."""
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return values + 1
    if name.endswith("A_log"):
        values = -np.exp(values)
    if name.endswith(("conv1d.weight", "shared_expert_gate.weight")):
        values = values.squeeze()
    return _moved(name, values, config, _tile)


def from_file(name: str, values: Floats, config: dict[str, Any]) -> Floats:
    """The inverse of `to_file`."""
    if name.endswith("norm.weight") and ".linear_attn." not in name:
        return values - 1
    values = _moved(name, values, config, _group)
    if name.endswith("A_log"):
        return np.log(-values)
    if name.endswith("conv1d.weight"):
        return values[:, None]
    return values[None] if name.endswith("shared_expert_gate.weight") else values


def _tile(heads: Floats, keys: int) -> Floats:
    """(value heads, …), those of a key head side by side → the first of each key head, then the second of each."""
    return heads.reshape(keys, -1, *heads.shape[1:]).swapaxes(0, 1).reshape(heads.shape)


def _group(heads: Floats, keys: int) -> Floats:
    return heads.reshape(-1, keys, *heads.shape[1:]).swapaxes(0, 1).reshape(heads.shape)


def _moved(name: str, values: Floats, config: dict[str, Any], order: Any) -> Floats:
    if config["model_type"] == "qwen3_next" or ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return values
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if name.endswith("out_proj.weight"):
        return np.ascontiguousarray(_rows(values.T, keys, heads, order).T)
    first = 2 * keys * config["linear_key_head_dim"] if "qkv" in name or "conv1d" in name else 0
    return np.concatenate([values[:first], _rows(values[first:], keys, heads, order)])


def _rows(rows: Floats, keys: int, heads: int, order: Any) -> Floats:
    return order(rows.reshape(heads, -1, *rows.shape[1:]), keys).reshape(rows.shape)


def projections_apart(weights: dict[str, Floats], config: dict[str, Any]) -> dict[str, Floats]:
    """The projection of a qwen3_next, by key head, as two: queries, keys and values of all heads; and gates."""
    rearranged = dict[str, Floats]()
    for name, values in weights.items():
        if not name.endswith(_TOGETHER):
            rearranged[name] = values
            continue
        stem, heads = name.removesuffix(_TOGETHER), values.reshape(config["linear_num_key_heads"], -1, values.shape[-1])
        parts = [one.reshape(-1, values.shape[-1]) for one in np.split(heads, _borders(config), axis=1)]
        rearranged |= {f"{stem}in_proj_qkv.weight": np.concatenate(parts[:3]), f"{stem}in_proj_z.weight": parts[3]}
    return rearranged


def projections_together(weights: dict[str, Floats], config: dict[str, Any]) -> dict[str, Floats]:
    """The inverse of `projections_apart`."""
    rearranged = dict(weights)
    if config["model_type"] != "qwen3_next":
        return rearranged
    keys = config["linear_num_key_heads"]
    for name in [name for name in weights if name.endswith("in_proj_z.weight")]:
        stem, wide = name.removesuffix("in_proj_z.weight"), keys * config["linear_key_head_dim"]
        mixed, gates = rearranged.pop(f"{stem}in_proj_qkv.weight"), rearranged.pop(name)
        parts = [*np.split(mixed, [wide, 2 * wide]), gates]
        heads = np.concatenate([one.reshape(keys, -1, one.shape[-1]) for one in parts], axis=1)
        rearranged[stem + _TOGETHER] = np.ascontiguousarray(heads.reshape(-1, mixed.shape[-1]))
    return rearranged


def _borders(config: dict[str, Any]) -> list[int]:
    width = config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // config["linear_num_key_heads"] * config["linear_value_head_dim"]
    return [width, 2 * width, 2 * width + values]


def metadata(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a file about recurrent layers, of the architecture `name`."""
    heads, rope = config["linear_num_value_heads"], config["rope_parameters"]
    width = config["head_dim"]
    fields: dict[str, Any] = {
        f"{name}.ssm.conv_kernel": config["linear_conv_kernel_dim"],
        f"{name}.ssm.state_size": config["linear_key_head_dim"],
        f"{name}.ssm.group_count": config["linear_num_key_heads"],
        f"{name}.ssm.time_step_rank": heads,
        f"{name}.ssm.inner_size": heads * config["linear_value_head_dim"],
        f"{name}.full_attention_interval": config.get("full_attention_interval", 4),
        f"{name}.attention.recurrent_layers": [kind == "linear_attention" for kind in config["layer_types"]],
        f"{name}.rope.dimension_count": int(width * rope.get("partial_rotary_factor", 0.25)),
        f"{name}.rope.dimension_sections": [11, 11, 10, 0],
    }
    if "num_experts" in config:
        fields |= {
            f"{name}.expert_count": config["num_experts"],
            f"{name}.expert_used_count": config["num_experts_per_tok"],
            f"{name}.expert_feed_forward_length": config["moe_intermediate_size"],
            f"{name}.expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
        }
    return fields
