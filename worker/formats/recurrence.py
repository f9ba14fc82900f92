"""The recurrent layers of a model type that mixes them with attention, read from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from control.errors import ModelFilesError, UnsupportedArchitecture

LINEAR, FULL = "linear_attention", "full_attention"

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
"""Field of the configuration of a GGUF file, whose value heads are in another order: see `Recurrence`."""

LARGEST = 2**20


@dataclass(frozen=True)
class Recurrence:
    """The heads of recurrent layers (gated delta rule) and the kinds of all layers. `taps`: inputs that the convolution
    reads, the newest included. `tiled`: value head h belongs to key head h mod `key_heads`, as in GGUF files, so that
    the value heads of a key head lie apart; else the value heads of each key head lie side by side."""

    kinds: tuple[str, ...]
    taps: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled: bool = False

    @property
    def layers(self) -> int:
        return self.kinds.count(LINEAR)

    @property
    def regions(self) -> tuple[int, ...]:
        """Widths of all queries, all keys and all values; where those are tiled, of each tile of values, which has one
        for each key head. The ranks share each region evenly."""
        keys = self.key_heads * self.key_dim
        tiles = self.value_heads // self.key_heads if self.tiled else 1
        return keys, keys, *([self.value_heads * self.value_dim // tiles] * tiles)


def recurrence_of(config: dict[str, Any]) -> Recurrence:
    """The recurrent layers of a model type that has some. Raises ModelFilesError or UnsupportedArchitecture naming a
    field and its value."""
    taps, key_dim, value_dim, key_heads, value_heads, interval = (_size(config, name) for name in DEFAULTS)
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
    return Recurrence(_kinds(config, interval), taps, key_heads, value_heads, key_dim, value_dim, tiled)


def _kinds(config: dict[str, Any], interval: int) -> tuple[str, ...]:
    given, layers = config.get("layer_types"), config["num_hidden_layers"]
    if given is None:
        given = [FULL if (layer + 1) % interval == 0 else LINEAR for layer in range(layers)]
    if not isinstance(given, list) or len(cast(list[Any], given)) != layers:
        raise ModelFilesError(
            f"config.json has layer_types = {str(given)[:60]}; a list of num_hidden_layers = {layers} kinds is needed."
        )
    kinds = tuple(str(kind) for kind in cast(list[Any], given))
    strange = sorted(set(kinds) - {LINEAR, FULL})
    if strange:
        raise UnsupportedArchitecture(
            f"config.json has a layer of type {strange[0][:60]!r} in layer_types. Served are {LINEAR} and {FULL}."
        )
    if FULL not in kinds:
        raise UnsupportedArchitecture(f"config.json has no layer of type {FULL}: a model without one is not served.")
    return kinds


def _size(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    value = DEFAULTS[name] if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST:
        raise ModelFilesError(
            f"config.json has {name} = {str(value)[:60]}; a whole number from 1 to {LARGEST} is needed."
        )
    return value
