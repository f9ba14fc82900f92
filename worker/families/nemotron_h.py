"""nemotron_h: each layer is a Mamba-2 layer, attention without positions, a feed-forward network or experts alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from control.errors import UnsupportedArchitecture
from worker.families.family import Family, Fields, Roles
from worker.families.fields import switch, wrong
from worker.families.gguf import MAMBA_NAMES, Gguf, Metadata, layers_described, mamba_described, routing_described
from worker.families.parts import MAMBA, ROUTED, ROUTED_EXPERTS
from worker.families.recurrence import (
    FEED_FORWARD_ALONE,
    FULL,
    KINDS,
    LINEAR,
    Mamba,
    check_activation,
    check_limits,
    mamba_sizes,
)

_ROLES: Roles = {
    **{name.replace("mamba.", "mixer."): role for name, role in MAMBA.items()},
    "mixer.q_proj": "colwise",
    "mixer.k_proj": "colwise",
    "mixer.v_proj": "colwise",
    "mixer.o_proj": "rowwise",
    "mixer.up_proj": "colwise",
    "mixer.down_proj": "rowwise",
    "mixer.experts": "experts",
    "mixer.shared_experts.up_proj": "colwise",
    "mixer.shared_experts.down_proj": "rowwise",
}
_KINDS = "layers_block_type"
_PATTERN = "hybrid_override_pattern"
_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
_DEFAULT_KINDS = (LINEAR, "moe", FULL, "mlp")
"""Those of transformers' class."""
_OLDER_NAMES = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
_SERVED = {LINEAR: LINEAR, FULL: FULL, "mlp": FEED_FORWARD_ALONE, "moe": FEED_FORWARD_ALONE}


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the kinds of all layers and their number, which files have as a text of letters, or not
    at all. Raises ModelFilesError."""
    pattern = config.get(_PATTERN)
    kinds: Any = config.get(_KINDS)
    if kinds is None:
        kinds = config.get("layer_types")
    if kinds is None and pattern is None:
        kinds = list(_DEFAULT_KINDS)
    elif kinds is None and isinstance(pattern, str):
        kinds = [_LETTERS.get(letter, letter) for letter in pattern]
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in cast(list[Any], kinds)):
        raise wrong(_KINDS, pattern if kinds is None else kinds, "a list of the kinds of layers")
    renamed = {_OLDER_NAMES[name]: value for name, value in config.items() if name in _OLDER_NAMES}
    whole = [KINDS.get(kind, kind) for kind in cast(list[str], kinds)]
    return config | renamed | {_KINDS: whole, "num_hidden_layers": len(whole)}


def mamba_of(config: dict[str, Any]) -> Mamba:
    """The Mamba layers. Raises ModelFilesError or UnsupportedArchitecture naming a field and its value."""
    defaults = {"conv_kernel": 4, "mamba_num_heads": 128, "n_groups": 8, "mamba_head_dim": 64, "ssm_state_size": 128}
    taps, heads, groups, head_dim, state = mamba_sizes(config, defaults)
    check_activation(config, "mamba_hidden_act")
    check_limits(config)
    kinds = completed(config)[_KINDS]
    for kind in kinds:
        if kind not in _SERVED:
            raise UnsupportedArchitecture(
                f"config.json has a layer of type {kind[:60]!r} in {_KINDS}. Served are {', '.join(_SERVED)}."
            )
    for needed in (LINEAR, FULL):
        if needed not in kinds:
            raise UnsupportedArchitecture(
                f"config.json has no layer of type {needed} in {_KINDS}: a model without one is not served."
            )
    bias = switch(config, "use_bias", False)
    return Mamba(
        kinds=tuple(_SERVED[kind] for kind in kinds),
        taps=taps,
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        state=state,
        conv_bias=switch(config, "use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
    )


def _is_sparse(fields: Fields, layer: int) -> bool:
    kinds = fields[_KINDS]
    return kinds is not None and kinds[layer] == "moe"


_GGUF_NAMES = {
    **{name.replace("mamba.", "mixer."): stored for name, stored in MAMBA_NAMES.items()},
    "norm": "attn_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "mixer.up_proj": "ffn_up",
    "mixer.down_proj": "ffn_down",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp",
    "mixer.shared_experts.down_proj": "ffn_down_shexp",
}
_OUTER_NAMES = {"model.embeddings": "token_embd", "model.norm_f": "output_norm", "lm_head": "output"}


def _kind_in(model: Metadata, layer: int) -> str:
    """A layer's kind, by its tensors."""
    for stored, kind in (("ssm_in", LINEAR), ("attn_q", FULL), ("ffn_gate_inp", "moe")):
        if f"blk.{layer}.{stored}.weight" in model.tensors:
            return kind
    return "mlp"


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    name = model.architecture
    taps, heads, inner, groups, state, conv_bias = mamba_described(model)
    kinds = [_kind_in(model, layer) for layer in layers_described(model, common["num_hidden_layers"])]
    sparse: dict[str, Any] = {}
    if "moe" in kinds:
        sparse = routing_described(model) | {
            "n_routed_experts": model.whole(f"{name}.expert_count"),
            "moe_shared_expert_intermediate_size": model.whole(f"{name}.expert_shared_feed_forward_length"),
        }
    dense = [tensor.shape[0] for stored, tensor in model.tensors.items() if stored.endswith(".ffn_up.weight")]
    return {
        "mlp_hidden_act": "relu2",
        "layer_norm_epsilon": common["rms_norm_eps"],
        "intermediate_size": dense[0] if dense else common["intermediate_size"],
        _KINDS: kinds,
        "conv_kernel": taps,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": groups,
        "ssm_state_size": state,
        "use_conv_bias": conv_bias,
        **sparse,
    }


FAMILIES = [
    Family(
        "nemotron_h",
        _ROLES,
        (
            *(
                "layer_norm_epsilon",
                "tie_word_embeddings",
                "head_dim",
                "intermediate_size",
                "mlp_hidden_act",
                "mlp_bias",
            ),
            *(_KINDS, *ROUTED, "moe_shared_expert_intermediate_size"),
        ),
        aliases={"n_routed_experts": "num_local_experts"},
        completed=completed,
        norms=("norm", None, "norm", None),
        activations={"relu2": "relu2"},
        rotates=lambda fields, layer, kind: False,
        torch_numbers=("moe_latent_size",),
        recurrent=mamba_of,
        experts=replace(
            ROUTED_EXPERTS,
            tensors=("", "mixer.experts.{}.up_proj.weight", "mixer.experts.{}.down_proj.weight"),
            layers=_is_sparse,
        ),
        native_names=(
            ("model.embed_tokens.", "model.embeddings."),
            ("model.norm.", "model.norm_f."),
            (".self_attn.", ".mixer."),
            (".mamba.", ".mixer."),
            (".mlp.", ".mixer."),
        ),
        gguf=tuple(Gguf(name, _from_gguf, _GGUF_NAMES, _OUTER_NAMES) for name in ("nemotron_h", "nemotron_h_moe")),
    ),
]
