"""The recurrent layers of model types that mix them with attention, read from config.json: gated delta rules, Mamba-2
and short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.families.fields import LARGEST, is_number, is_whole, size, switch, wrong

LINEAR = "linear_attention"
FULL = "full_attention"
HYBRID = "hybrid"
"""A layer with both, whose outputs are added."""
FEED_FORWARD_ALONE = "feed_forward"
"""A layer with neither."""

DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
"""Those of transformers' classes, which these types share."""

TILED = "linear_value_heads_tiled"
"""Field of the configuration of a GGUF file, whose value heads are in another order: see `DeltaRule`."""


def recurs(kind: str) -> bool:
    """True for a kind of layer with a recurrent state."""
    return kind in (LINEAR, HYBRID)


def attends(kind: str) -> bool:
    """True for a kind of layer with keys and values."""
    return kind not in (LINEAR, FEED_FORWARD_ALONE)


@dataclass(frozen=True)
class Recurrence:
    """The recurrent layers of a model. `kinds` has LINEAR for each of them, whatever their type calls it, FULL for
    each layer with attention, HYBRID for one with both, and FEED_FORWARD_ALONE. `taps`: inputs that the convolution of
    a layer reads, the newest included."""

    kinds: tuple[str, ...]
    taps: int

    @property
    def layers(self) -> int:
        return sum(map(recurs, self.kinds))

    @property
    def regions(self) -> tuple[int, ...]:
        """Widths of the parts of a weight with the role `regions`, each shared evenly by the ranks."""
        raise NotImplementedError

    def channels(self, ranks: int) -> int:
        """Those of the convolution on one of `ranks` ranks."""
        return sum(self.regions) // ranks

    @property
    def groups_of_heads(self) -> int:
        """Groups of heads that a weight with the role `mamba` has parts for; 0 where there are none."""
        return 0

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Heads, which the ranks share evenly, and the shape of the matrix that each keeps of a sequence."""
        return 0, 0, 0

    @property
    def shared(self) -> tuple[int, str]:
        """A number that the ranks must divide, and its description with the field that holds it."""
        raise NotImplementedError


@dataclass(frozen=True)
class DeltaRule(Recurrence):
    """Gated delta rule. `tiled`: value head h belongs to key head h mod `key_heads`, as in GGUF files, so that the
    value heads of a key head lie apart; else the value heads of each key head lie side by side."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False

    @property
    def regions(self) -> tuple[int, ...]:
        """Widths of all queries, all keys and all values; where those are tiled, of each tile of values, which has one
        for each key head."""
        keys = self.key_heads * self.key_dim
        tiles = self.value_heads // self.key_heads if self.tiled else 1
        return keys, keys, *([self.value_heads * self.value_dim // tiles] * tiles)

    @property
    def matrices(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def shared(self) -> tuple[int, str]:
        return self.key_heads, "key heads of recurrent layers (linear_num_key_heads)"


def delta_rule_of(config: dict[str, Any]) -> DeltaRule:
    """The recurrent layers of a model type that has the gated delta rule. Raises ModelFilesError or
    UnsupportedArchitecture naming a field and its value."""
    taps, key_dim, value_dim, key_heads, value_heads, interval = (
        size(config, name, default) for name, default in DEFAULTS.items()
    )
    if config.get("hidden_act") not in (None, "silu", "swish"):
        raise UnsupportedArchitecture(
            f"config.json has hidden_act = {str(config['hidden_act'])[:60]!r}; recurrent layers are served with silu."
        )
    if taps < 2:
        raise wrong("linear_conv_kernel_dim", taps, "at least 2")
    if value_heads % key_heads:
        raise UnsupportedArchitecture(
            f"{value_heads} value heads of recurrent layers can't share {key_heads} key heads evenly "
            "(linear_num_value_heads, linear_num_key_heads)."
        )
    tiled = config.get(TILED) is True and value_heads != key_heads
    return DeltaRule(_kinds(config, interval), taps, key_heads, value_heads, key_dim, value_dim, tiled)


def _kinds(config: dict[str, Any], interval: int) -> tuple[str, ...]:
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(config["num_hidden_layers"])]
    return checked_kinds(config, kinds, {LINEAR: LINEAR, FULL: FULL})


def checked_kinds(config: dict[str, Any], listed: Any, served: Mapping[str, str]) -> tuple[str, ...]:
    """`listed`, the names of the layers' kinds in a file, as kinds of layers by `served`. Raises ModelFilesError or
    UnsupportedArchitecture."""
    layers = config["num_hidden_layers"]
    if not isinstance(listed, list) or len(cast(list[Any], listed)) != layers:
        raise wrong("layer_types", listed, f"a list of num_hidden_layers = {layers} kinds")
    names = [str(name) for name in cast(list[Any], listed)]
    strange = sorted(set(names) - served.keys())
    if strange:
        raise UnsupportedArchitecture(
            f"config.json has a layer of type {strange[0][:60]!r} in layer_types. Served are {' and '.join(served)}."
        )
    kinds = tuple(served[name] for name in names)
    if FULL not in kinds:
        [attending] = (name for name, kind in served.items() if kind == FULL)
        raise UnsupportedArchitecture(
            f"config.json has no layer of type {attending}: a model without one is not served."
        )
    return kinds


# The Mamba-2 layers of model types that mix them with attention, read from config.json.


KINDS = {"mamba": LINEAR, "attention": FULL}
"""By the names that published files have for them. transformers also reads its own names."""

MAMBA_DEFAULTS = {
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
    for name in (*MAMBA_DEFAULTS, *NEEDS_A_VALUE):
        if name in config and config[name] is None:
            raise ModelFilesError(f"config.json has {name} = null; remove the field, or give it a value.")
    taps, heads, groups, state, expand, _ = mamba_sizes(config, MAMBA_DEFAULTS)
    head_dim = head_width(config, heads, expand * config["hidden_size"], "mamba_expand times hidden_size")
    _check_features(config)
    conv_bias = switch(config, "mamba_conv_bias", True)
    bias = switch(config, "mamba_proj_bias", False)
    mamba = Mamba(_mamba_kinds(config), taps, heads, groups, head_dim, state, conv_bias, bias, bias)
    return mamba if mamba.layers else None


def mamba_sizes(config: dict[str, Any], defaults: Mapping[str, int]) -> list[int]:
    """The values of the fields `defaults`, of which the first are taps, heads and groups. Raises ModelFilesError or
    UnsupportedArchitecture."""
    sizes = [size(config, name, default) for name, default in defaults.items()]
    taps, heads, groups, *_ = zip(defaults, sizes, strict=True)
    if taps[1] < 2:
        raise wrong(*taps, "at least 2")
    if heads[1] % groups[1]:
        raise UnsupportedArchitecture(
            f"{heads[1]} heads of Mamba layers can't share {groups[1]} groups evenly ({heads[0]}, {groups[0]})."
        )
    return sizes


def head_width(config: dict[str, Any], heads: int, inner: int, described: str) -> int:
    """`mamba_d_head`, by which `heads` have `inner` numbers."""
    width = config.get("mamba_d_head", "auto")
    head_dim = inner // heads if width == "auto" else width
    if not is_whole(head_dim, most=inner) or heads * head_dim != inner:
        raise ModelFilesError(
            f"config.json has mamba_n_heads = {heads} and mamba_d_head = {str(width)[:60]}; their product must be "
            f"{described} = {inner}."
        )
    return head_dim


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


def _mamba_kinds(config: dict[str, Any]) -> tuple[str, ...]:
    if "layers_block_type" in config:
        raise UnsupportedArchitecture("config.json has layers_block_type. Rename the field to layer_types.")
    kinds: Any = config.get("layer_types")
    if isinstance(kinds, list):
        names = {kind: name for name, kind in KINDS.items()}
        kinds = [names.get(kind, kind) if isinstance(kind, str) else kind for kind in cast(list[Any], kinds)]
    return checked_kinds(config, kinds, KINDS)


# The recurrent layers of lfm2, read from config.json: short convolutions between two gates, and nothing else.


CONVOLUTION = "conv"
"""The kind of such a layer in `layer_types`."""


@dataclass(frozen=True)
class ShortConvolution(Recurrence):
    """Layers that compute C · convolution(B · x) by channel. `width` is that of B, C and x, the hidden size."""

    width: int

    @property
    def regions(self) -> tuple[int, ...]:
        """Widths of B, C and x, the outputs of one projection."""
        return self.width, self.width, self.width

    def channels(self, ranks: int) -> int:
        return self.width // ranks

    @property
    def shared(self) -> tuple[int, str]:
        return self.width, "channels of the layers with a convolution (hidden_size)"


def short_convolutions_of(config: dict[str, Any]) -> ShortConvolution:
    """The layers of a model of lfm2. Raises ModelFilesError or UnsupportedArchitecture naming a field and its value."""
    taps = size(config, "conv_L_cache", 3, least=2)
    width = config["hidden_size"]
    layers = config["num_hidden_layers"]
    switch(config, "conv_bias", False)
    if "head_dim" in config and config["head_dim"] is None:
        raise wrong("head_dim", None, "a width, or no such field,")
    for name in ("conv_dim", "conv_dim_out", "block_dim"):
        if config.get(name, width) != width:
            raise UnsupportedArchitecture(
                f"config.json has {name} = {str(config[name])[:60]}; served is hidden_size = {width}."
            )
    switch(config, "tie_embedding", True)
    kinds = config.get("layer_types")
    if kinds is None:
        attending = _attending(config, layers)
        kinds = [FULL if layer in attending else CONVOLUTION for layer in range(layers)]
    return ShortConvolution(checked_kinds(config, kinds, {CONVOLUTION: LINEAR, FULL: FULL}), taps, width)


def feed_forward_width(config: dict[str, Any]) -> int:
    """The width of the feed-forward networks, by the formula of transformers' class. Raises ModelFilesError."""
    alias = "block_ff_dim"  # in published files, before the other name
    width = _whole(config, alias if alias in config else "intermediate_size", 12288)
    if not switch(config, "block_auto_adjust_ff_dim", True):
        return width
    width = _above_zero(int(2 * width / 3))
    multiple = _whole(config, "block_multiple_of", 256)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if not is_number(factor) or not 0 < factor <= LARGEST / width:
        raise wrong("block_ffn_dim_multiplier", factor, f"a number above 0 for a width of at most {LARGEST}")
    return _above_zero(multiple * ((int(factor * width) + multiple - 1) // multiple))


def _attending(config: dict[str, Any], layers: int) -> set[int]:
    """The layers with attention: those that are listed, or all."""
    attending = config.get("full_attn_idxs")
    if attending is None:
        return set(range(layers))
    if not isinstance(attending, list) or not all(
        is_whole(layer, 0, layers - 1) for layer in cast(list[Any], attending)
    ):
        raise wrong("full_attn_idxs", attending, f"a list of layers below num_hidden_layers = {layers}")
    return set(cast(list[int], attending))


def _above_zero(width: int) -> int:
    if width < 1:
        raise wrong("intermediate_size", width, "a width of at least 1, after block_auto_adjust_ff_dim,")
    return width


def _whole(config: dict[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if not is_whole(value):
        raise wrong(name, value, "a positive whole number")
    return value
