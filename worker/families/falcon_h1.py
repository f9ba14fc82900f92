"""falcon_h1: in each layer attention and a Mamba-2 layer read the same input, and their outputs are added."""

from __future__ import annotations

from typing import Any, cast

from control.errors import ModelFilesError
from worker.families.family import Family
from worker.families.gguf import LAYER_NAMES, MAMBA_NAMES, Gguf, Metadata, mamba_described
from worker.families.parts import ATTENTION, WITH_BIASES
from worker.families.recurrence import (
    HYBRID,
    Mamba,
    check_activation,
    check_heads,
    check_limits,
    head_width,
    size,
    switch,
)
from worker.families.roles import Roles

_MAMBA: Roles = {
    "mamba.in_proj": "mamba",
    "mamba.conv1d": "mamba",
    "mamba.A_log": "colwise",
    "mamba.D": "colwise",
    "mamba.dt_bias": "colwise",
    "mamba.norm": "colwise",
    "mamba.out_proj": "rowwise",
}
_FEED_FORWARD: Roles = {
    "feed_forward.gate_proj": "colwise",
    "feed_forward.up_proj": "colwise",
    "feed_forward.down_proj": "rowwise",
}
_PARTS = 5
"""Of the outputs of a Mamba layer's first projection: gates, inputs, B, C and steps."""


def mamba_of(config: dict[str, Any]) -> Mamba:
    """The Mamba layers. Raises ModelFilesError or UnsupportedArchitecture naming a field and its value."""
    taps, heads, groups, state = (
        size(config, name, default)
        for name, default in (
            ("mamba_d_conv", 4),
            ("mamba_n_heads", 128),
            ("mamba_n_groups", 1),
            ("mamba_d_state", 256),
        )
    )
    check_heads(("mamba_d_conv", taps), ("mamba_n_heads", heads), ("mamba_n_groups", groups))
    if config.get("mamba_d_ssm", 1024) is None:
        inner = size(config, "mamba_expand", 2) * config["hidden_size"]
    else:
        inner = size(config, "mamba_d_ssm", 1024)
    check_activation(config)
    check_limits(config)
    multipliers(config, "mlp_multipliers", 2)
    into = _multiplier(config, "ssm_in_multiplier")
    return Mamba(
        kinds=(HYBRID,) * config["num_hidden_layers"],
        taps=taps,
        heads=heads,
        groups=groups,
        head_dim=head_width(config, heads, inner, "mamba_d_ssm"),
        state=state,
        conv_bias=switch(config, "mamba_conv_bias", True),
        in_bias=switch(config, "mamba_proj_bias", False),
        out_bias=switch(config, "projectors_bias", False),
        norm=_norm(config),
        in_scale=into,
        scales=multipliers(config, "ssm_multipliers", _PARTS),
        out_scale=_multiplier(config, "ssm_out_multiplier"),
    )


def _norm(config: dict[str, Any]) -> Any:
    before = switch(config, "mamba_norm_before_gate", True)
    if not switch(config, "mamba_rms_norm", False):
        return None
    return "before_gate" if before else "gated"


def _multiplier(config: dict[str, Any], name: str) -> float:
    return _checked(name, config.get(name, 1.0))


def multipliers(config: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    """A list of `count` numbers; 1 each where there is none."""
    values = config.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(cast(list[Any], values)) != count:
        raise ModelFilesError(f"config.json has {name} = {str(values)[:60]}; a list of {count} numbers is needed.")
    return tuple(_checked(name, value) for value in cast(list[Any], values))


def _checked(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ModelFilesError(f"config.json has {name} = {str(value)[:60]}; a number above 0 is needed.")
    return float(value)


_GGUF_NAMES = {
    **{name: stored for name, stored in LAYER_NAMES.items() if name.startswith(("self_attn.", "input_"))},
    **MAMBA_NAMES,
    "pre_ff_layernorm.weight": "ffn_norm",
    "feed_forward.gate_proj": "ffn_gate",
    "feed_forward.up_proj": "ffn_up",
    "feed_forward.down_proj": "ffn_down",
}


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """Files have weights that were multiplied by all multipliers."""
    taps, heads, inner, groups, state, conv_bias = mamba_described(model)
    return {
        "hidden_act": "silu",
        "mamba_d_conv": taps,
        "mamba_n_heads": heads,
        "mamba_d_ssm": inner,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": state,
        "mamba_conv_bias": conv_bias,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in model.tensors,
        "mamba_norm_before_gate": False,
    }


FAMILIES = [
    Family(
        "falcon_h1",
        {**ATTENTION, **_MAMBA, **_FEED_FORWARD},
        (
            *WITH_BIASES,
            *("embedding_multiplier", "lm_head_multiplier", "mlp_multipliers"),
            *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
        ),
        activations={"silu": "silu", "swish": "silu"},
        norms=("input_layernorm", None, "pre_ff_layernorm", None),
        recurrent=mamba_of,
        native_names=((".mlp.", ".feed_forward."), ("model.norm.", "model.final_layernorm.")),
        gguf=(
            Gguf(
                "falcon-h1",
                _from_gguf,
                _GGUF_NAMES,
                {"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"},
            ),
        ),
    ),
]
