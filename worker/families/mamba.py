"""The Mamba-2 layers of model types that mix them with attention, read from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.families.recurrence import FULL, LARGEST, LINEAR, Recurrence, checked_kinds

KINDS = {"mamba": LINEAR, "attention": FULL}
"""The names that published files have for kinds of layers."""

DEFAULTS = {
    "mamba_d_conv": 4,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_expand": 2,
    "shared_intermediate_size": 1024,
}
"""Those of transformers' class."""

NEEDS_A_VALUE = (
    *("num_local_experts", "num_experts_per_tok", "head_dim", "intermediate_size", "tie_word_embeddings"),
    *("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
)
"""Fields that may be left out, but of which transformers takes null for a value."""

POSITIONS = (None, "nope", "rope")


@dataclass(frozen=True)
class Mamba(Recurrence):
    """Mamba-2 (https://arxiv.org/abs/2405.21060): each head keeps a matrix of `state` rows and `head_dim` columns. The
    heads of a group share B and C, of `state` numbers each."""

    heads: int
    groups: int
    head_dim: int
    state: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm: Literal["gated", "before_gate"] | None = "gated"
    """If the outputs of a group of heads are normed after they were gated, before that, or not at all."""
    in_scale: float = 1.0
    """Of the inputs."""
    scales: tuple[float, ...] = (1.0,) * 5
    """By what the parts of the first projection's outputs, as `regions`, are multiplied."""
    out_scale: float = 1.0
    """Of the outputs of a layer that attends as well."""

    @property
    def regions(self) -> tuple[int, ...]:
        """Widths of the gates, inputs, B, C and steps that the first projection gives; the middle three are convolved.
        The ranks share B and C by group, and keep copies where there are fewer groups than ranks."""
        inner = self.heads * self.head_dim
        of_groups = self.groups * self.state
        return inner, inner, of_groups, of_groups, self.heads

    def channels(self, ranks: int) -> int:
        return self.heads * self.head_dim // ranks + 2 * self.state * max(1, self.groups // ranks)

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.heads, self.state, self.head_dim

    @property
    def groups_of_heads(self) -> int:
        return self.groups

    @property
    def shared(self) -> tuple[int, str]:
        return self.heads, "heads of Mamba layers (mamba_n_heads)"

    def check_groups(self, ranks: int) -> None:
        """Raise UnsupportedArchitecture where `ranks` can neither share the groups nor keep copies of them."""
        if self.groups % ranks and ranks % self.groups:
            fitting = [str(tp) for tp in range(1, self.groups + 1) if self.groups % tp == 0 and self.heads % tp == 0]
            raise UnsupportedArchitecture(
                f"{self.groups} groups of Mamba layers (mamba_n_groups) can be neither divided among {ranks} ranks nor "
                f"repeated on them. Use one of --tp {', '.join(fitting[:8])}."
            )


def mamba_of(config: dict[str, Any]) -> Mamba | None:
    """The Mamba layers of a model of the type granitemoehybrid; None where all of its layers have attention. Raises
    ModelFilesError or UnsupportedArchitecture naming a field and its value."""
    for name in (*DEFAULTS, *NEEDS_A_VALUE):
        if name in config and config[name] is None:
            raise ModelFilesError(f"config.json has {name} = null; remove the field, or give it a value.")
    taps, heads, groups, state, expand, _ = (_size(config, name) for name in DEFAULTS)
    check_heads(("mamba_d_conv", taps), ("mamba_n_heads", heads), ("mamba_n_groups", groups))
    head_dim = head_width(config, heads, expand * config["hidden_size"], "mamba_expand times hidden_size")
    _check_features(config)
    conv_bias = switch(config, "mamba_conv_bias", True)
    bias = switch(config, "mamba_proj_bias", False)
    mamba = Mamba(_kinds(config), taps, heads, groups, head_dim, state, conv_bias, bias, bias)
    return mamba if mamba.layers else None


def check_heads(taps: tuple[str, int], heads: tuple[str, int], groups: tuple[str, int]) -> None:
    """Each is a field and its value."""
    if taps[1] < 2:
        raise ModelFilesError(f"config.json has {taps[0]} = {taps[1]}; at least 2 is needed.")
    if heads[1] % groups[1]:
        raise UnsupportedArchitecture(
            f"{heads[1]} heads of Mamba layers can't share {groups[1]} groups evenly ({heads[0]}, {groups[0]})."
        )


def head_width(config: dict[str, Any], heads: int, inner: int, described: str) -> int:
    """`mamba_d_head`, by which `heads` have `inner` numbers."""
    width = config.get("mamba_d_head", "auto")
    head_dim = inner // heads if width == "auto" else width
    if not isinstance(head_dim, int) or isinstance(head_dim, bool) or head_dim < 1 or heads * head_dim != inner:
        raise ModelFilesError(
            f"config.json has mamba_n_heads = {heads} and mamba_d_head = {str(width)[:60]}; their product must be "
            f"{described} = {inner}."
        )
    return head_dim


def switch(config: dict[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ModelFilesError(f"config.json has {name} = {str(value)[:60]}; true or false is needed.")
    return value


def check_activation(config: dict[str, Any], name: str = "hidden_act") -> None:
    if config.get(name, "silu") not in ("silu", "swish"):
        raise UnsupportedArchitecture(
            f"config.json has {name} = {str(config[name])[:60]!r}; Mamba layers are served with silu."
        )


def check_limits(config: dict[str, Any]) -> None:
    # transformers applies the limits to prompts alone, so a prompt and its answer would differ in them.
    limits = config.get("time_step_limit", [0.0, float("inf")])
    if not _is_no_limit(limits):
        raise UnsupportedArchitecture(
            f"config.json has time_step_limit = {str(limits)[:60]}; Mamba layers are served without one: "
            "from 0 to Infinity."
        )


def _check_features(config: dict[str, Any]) -> None:
    check_activation(config)
    if (positions := config.get("position_embedding_type")) not in POSITIONS:
        raise UnsupportedArchitecture(
            f"config.json has position_embedding_type = {str(positions)[:60]!r}; served are 'nope' and 'rope'."
        )
    check_limits(config)


def _is_no_limit(limits: Any) -> bool:
    if not isinstance(limits, list) or len(cast(list[Any], limits)) != 2:
        return limits is None
    low, high = cast(list[Any], limits)
    return low == 0 and high in (float("inf"), {"__float__": "Infinity"})


def _kinds(config: dict[str, Any]) -> tuple[str, ...]:
    if "layers_block_type" in config:
        raise UnsupportedArchitecture("config.json has layers_block_type. Rename the field to layer_types.")
    kinds: Any = config.get("layer_types")
    if isinstance(kinds, list):
        kinds = [KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in cast(list[Any], kinds)]
    return checked_kinds(config, kinds, LINEAR, ("mamba", "attention"))


def _size(config: dict[str, Any], name: str) -> int:
    value = config.get(name, DEFAULTS[name])
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise ModelFilesError(
            f"config.json has {name} = {str(value)[:60]}; a whole number from 1 to {LARGEST} is needed."
        )
    return value
