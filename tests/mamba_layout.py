"""Models with Mamba-2 layers as llama.cpp's converter writes them to GGUF files, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

ARCHITECTURES = {"falcon_h1": "falcon-h1", "granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h_moe"}
_LAYER = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "norm": "ssm_norm", "out_proj": "ssm_out"}
PARTS = {f"mamba.{name}": stored for name, stored in _LAYER.items()}
NEMOTRON_PARTS = {
    **{f"mixer.{name}": stored for name, stored in _LAYER.items()},
    **{f"mixer.{name}_proj": f"attn_{name}" for name in ("q", "k", "v")},
    "mixer.o_proj": "attn_output",
    "norm": "attn_norm",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}
WHOLE = {
    f"{module}.{name}": stored
    for module in ("mamba", "mixer")
    for name, stored in (("A_log", "ssm_a"), ("D", "ssm_d"), ("dt_bias", "ssm_dt.bias"))
} | {"mixer.gate.e_score_correction_bias": "exp_probs_b.bias", "pre_ff_layernorm.weight": "ffn_norm"}
OF_HEADS = ("A_log", ".D", "conv1d", "norm", "correction")
"""Parts of the names of parameters that stay plain numbers."""
_SHARED = "shared_mlp.input_linear.weight"
_SHARED_PARTS = ("shared_mlp.gate.weight", "shared_mlp.up.weight")


def to_file(name: str, values: Floats, config: dict[str, Any]) -> Floats:
    """`values` of transformers' parameter `name` in a file's form."""
    if name.endswith("A_log"):
        return -np.exp(values)[:, None]
    if name.endswith((".mamba.D", ".mixer.D")):
        return values[:, None]
    if name.endswith("conv1d.weight"):
        return values[:, 0]
    groups = config.get("mamba_n_groups", config.get("n_groups"))
    return values.reshape(groups, -1) if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")) else values


def from_file(name: str, values: Floats) -> Floats:
    """The inverse of `to_file`."""
    if name.endswith("A_log"):
        return np.log(-values[:, 0])
    if name.endswith("conv1d.weight"):
        return values[:, None]
    flat = (".mamba.D", ".mixer.D", ".mamba.norm.weight", ".mixer.norm.weight")
    return values.reshape(-1) if name.endswith(flat) else values


def halves_apart(weights: dict[str, Floats]) -> dict[str, Floats]:
    """The expert of a granitemoehybrid that every token goes through, gate and up apart."""
    rearranged = dict[str, Floats]()
    for name, values in weights.items():
        if name.endswith(_SHARED):
            stem = name.removesuffix(_SHARED)
            rearranged |= {stem + part: half for part, half in zip(_SHARED_PARTS, np.split(values, 2), strict=True)}
        else:
            rearranged[name] = values
    return rearranged


def halves_together(weights: dict[str, Floats]) -> dict[str, Floats]:
    """The inverse of `halves_apart`."""
    tensors = {name: values for name, values in weights.items() if not name.endswith(_SHARED_PARTS)}
    for name, values in weights.items():
        if name.endswith(_SHARED_PARTS[0]):
            stem = name.removesuffix(_SHARED_PARTS[0])
            tensors[stem + _SHARED] = np.concatenate([values, weights[stem + _SHARED_PARTS[1]]])
    return tensors


def metadata(family: str, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a file about Mamba layers and what is beside them, of the architecture `name`."""
    nemotron = family == "nemotron_h"
    kinds = config["layers_block_type"] if nemotron else config.get("layer_types")
    heads = config["mamba_num_heads" if nemotron else "mamba_n_heads"]
    width = config["mamba_head_dim" if nemotron else "mamba_d_head"]
    fields: dict[str, Any] = {
        f"{name}.ssm.conv_kernel": config["conv_kernel" if nemotron else "mamba_d_conv"],
        f"{name}.ssm.state_size": config["ssm_state_size" if nemotron else "mamba_d_state"],
        f"{name}.ssm.group_count": config["n_groups" if nemotron else "mamba_n_groups"],
        f"{name}.ssm.time_step_rank": heads,
        f"{name}.ssm.inner_size": heads * width,
    }
    if family != "falcon_h1":
        attending = [kind in ("full_attention", "attention") for kind in kinds]
        shared = config["num_key_value_heads"]
        fields[f"{name}.attention.head_count_kv"] = [shared if one else 0 for one in attending]
        fields[f"{name}.rope.scaling.finetuned"] = False
    if nemotron:
        inner = config["moe_intermediate_size"]
        fields |= {
            f"{name}.block_count": len(kinds),
            f"{name}.attention.layer_norm_epsilon": float(config["layer_norm_epsilon"]),
            f"{name}.feed_forward_length": [inner if kind == "moe" else 0 for kind in kinds],
            f"{name}.expert_count": config["n_routed_experts"],
            f"{name}.expert_used_count": config["num_experts_per_tok"],
            f"{name}.expert_feed_forward_length": inner,
            f"{name}.expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            f"{name}.expert_group_count": config["n_group"],
            f"{name}.expert_group_used_count": config["topk_group"],
            f"{name}.expert_weights_scale": float(config["routed_scaling_factor"]),
            f"{name}.expert_weights_norm": config["norm_topk_prob"],
        }
    if family == "granitemoehybrid":
        fields |= {
            f"{name}.expert_count": config["num_local_experts"],
            f"{name}.expert_used_count": config["num_experts_per_tok"],
            f"{name}.expert_shared_feed_forward_length": config["shared_intermediate_size"],
        }
    return fields
