"""The recurrent layers of a model type that mixes them with attention, read from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from control.errors import ModelFilesError, UnsupportedArchitecture

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

LARGEST = 2**20


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
        raise ModelFilesError(f"config.json has linear_conv_kernel_dim = {taps}; at least 2 is needed.")
    if value_heads % key_heads:
        raise UnsupportedArchitecture(
            f"{value_heads} value heads of recurrent layers can't share {key_heads} key heads evenly "
            "(linear_num_value_heads, linear_num_key_heads)."
        )
    tiled = config.get(TILED) is True and value_heads != key_heads
    return DeltaRule(_kinds(config, interval), taps, key_heads, value_heads, key_dim, value_dim, tiled)


def _kinds(config: dict[str, Any], interval: int) -> tuple[str, ...]:
    if config.get("layer_types") is None:
        layers = range(config["num_hidden_layers"])
        return checked_kinds(config, [FULL if (layer + 1) % interval == 0 else LINEAR for layer in layers], LINEAR)
    return checked_kinds(config, config["layer_types"], LINEAR)


def checked_kinds(
    config: dict[str, Any], listed: Any, recurrent: str, shown: tuple[str, str] | None = None
) -> tuple[str, ...]:
    """`listed` as kinds of layers, LINEAR for each that is `recurrent`. Raises ModelFilesError or
    UnsupportedArchitecture; `shown`: the names that files have for it and for FULL, where they are others."""
    name, attending = shown or (recurrent, FULL)
    layers = config["num_hidden_layers"]
    if not isinstance(listed, list) or len(cast(list[Any], listed)) != layers:
        raise ModelFilesError(
            f"config.json has layer_types = {str(listed)[:60]}; a list of num_hidden_layers = {layers} kinds is needed."
        )
    kinds = tuple(str(kind) for kind in cast(list[Any], listed))
    strange = sorted(set(kinds) - {recurrent, FULL})
    if strange:
        raise UnsupportedArchitecture(
            f"config.json has a layer of type {strange[0][:60]!r} in layer_types. Served are {name} and {attending}."
        )
    if FULL not in kinds:
        raise UnsupportedArchitecture(
            f"config.json has no layer of type {attending}: a model without one is not served."
        )
    return tuple(LINEAR if kind == recurrent else FULL for kind in kinds)


def size(config: dict[str, Any], name: str, default: int) -> int:
    """The size `name`, or `default` where there is none. Raises ModelFilesError."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise ModelFilesError(
            f"config.json has {name} = {str(value)[:60]}; a whole number from 1 to {LARGEST} is needed."
        )
    return value
