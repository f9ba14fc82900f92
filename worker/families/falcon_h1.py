"""falcon_h1: in each layer attention and a Mamba-2 layer read the same input, and their outputs are added."""

from __future__ import annotations

from typing import Any, cast

from worker.families.family import Family
from worker.families.fields import is_number, size, switch, wrong
from worker.families.gguf import LAYER_NAMES, MAMBA_NAMES, Gguf, Metadata, gated_names, mamba_described
from worker.families.parts import ATTENTION, MAMBA, WITH_BIASES, gated
from worker.families.recurrence import HYBRID, Mamba, check_activation, check_limits, head_width, mamba_sizes

_PARTS = 5
"""Of the outputs of a Mamba layer's first projection: gates, inputs, B, C and steps."""


def mamba_of(config: dict[str, Any]) -> Mamba:
    """The Mamba layers. Raises ModelFilesError or UnsupportedArchitecture naming a field and its value."""
    defaults = {"mamba_d_conv": 4, "mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256}
    taps, heads, groups, state = mamba_sizes(config, defaults)
    if config.get("mamba_d_ssm", 1024) is None:
        inner = size(config, "mamba_expand", 2) * config["hidden_size"]
    else:
        inner = size(config, "mamba_d_ssm", 1024)
    check_activation(config)
    check_limits(config)
    multipliers(config, "mlp_multipliers", 2)
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
        in_scale=_multiplier("ssm_in_multiplier", config.get("ssm_in_multiplier", 1.0)),
        scales=multipliers(config, "ssm_multipliers", _PARTS),
        out_scale=_multiplier("ssm_out_multiplier", config.get("ssm_out_multiplier", 1.0)),
    )


def _norm(config: dict[str, Any]) -> Any:
    before = switch(config, "mamba_norm_before_gate", True)
    if not switch(config, "mamba_rms_norm", False):
        return None
    return "before_gate" if before else "gated"


def multipliers(config: dict[str, Any], name: str, count: int) -> tuple[float, ...]:
    """A list of `count` numbers; 1 each where there is none."""
    values = config.get(name)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(cast(list[Any], values)) != count:
        raise wrong(name, values, f"a list of {count} numbers")
    return tuple(_multiplier(name, value) for value in cast(list[Any], values))


def _multiplier(name: str, value: Any) -> float:
    if not is_number(value) or not 0 < value < float("inf"):
        raise wrong(name, value, "a number above 0")
    return float(value)


_GGUF_NAMES = {
    **{name: stored for name, stored in LAYER_NAMES.items() if name.startswith(("self_attn.", "input_"))},
    **MAMBA_NAMES,
    **gated_names("feed_forward"),
    "pre_ff_layernorm.weight": "ffn_norm",
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
        {**ATTENTION, **MAMBA, **gated("feed_forward")},
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
