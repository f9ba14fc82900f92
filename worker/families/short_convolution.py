"""The recurrent layers of lfm2, read from config.json: short convolutions between two gates, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.families.recurrence import FULL, Recurrence, checked_kinds, size

CONVOLUTION = "conv"
"""The kind of such a layer in `layer_types`."""

LARGEST_WIDTH = 2**31 - 1


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
    taps = size(config, "conv_L_cache", 3)
    width = config["hidden_size"]
    layers = config["num_hidden_layers"]
    if taps < 2:
        raise ModelFilesError(f"config.json has conv_L_cache = {taps}; at least 2 is needed.")
    switch(config, "conv_bias", False)
    if "head_dim" in config and config["head_dim"] is None:
        raise _wrong("head_dim", None, "a width, or no such field,")
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
    return ShortConvolution(checked_kinds(config, kinds, CONVOLUTION), taps, width)


def feed_forward_width(config: dict[str, Any]) -> int:
    """The width of the feed-forward networks, by the formula of transformers' class. Raises ModelFilesError."""
    alias = "block_ff_dim"  # in published files, before the other name
    width = _whole(config, alias if alias in config else "intermediate_size", 12288)
    if not switch(config, "block_auto_adjust_ff_dim", True):
        return width
    width = _above_zero(int(2 * width / 3))
    multiple = _whole(config, "block_multiple_of", 256)
    factor = config.get("block_ffn_dim_multiplier", 1.0)
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor <= LARGEST_WIDTH / width:
        raise _wrong("block_ffn_dim_multiplier", factor, f"a number above 0 for a width of at most {LARGEST_WIDTH}")
    return _above_zero(multiple * ((int(factor * width) + multiple - 1) // multiple))


def _attending(config: dict[str, Any], layers: int) -> set[int]:
    """The layers with attention: those that are listed, or all."""
    attending = config.get("full_attn_idxs")
    if attending is None:
        return set(range(layers))
    if not isinstance(attending, list) or not all(
        isinstance(one, int) and not isinstance(one, bool) and 0 <= one < layers for one in cast(list[Any], attending)
    ):
        raise _wrong("full_attn_idxs", attending, f"a list of layers below num_hidden_layers = {layers}")
    return set(cast(list[int], attending))


def _above_zero(width: int) -> int:
    if width < 1:
        raise _wrong("intermediate_size", width, "a width of at least 1, after block_auto_adjust_ff_dim,")
    return width


def _whole(config: dict[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_WIDTH:
        raise _wrong(name, value, "a positive whole number")
    return value


def switch(config: dict[str, Any], name: str, default: bool) -> bool:
    """Raises ModelFilesError naming the field and its value."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return value


def _wrong(name: str, value: object, needed: str) -> ModelFilesError:
    return ModelFilesError(f"config.json has {name} = {str(value)[:60]}; {needed} is needed.")
