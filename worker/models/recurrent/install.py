"""Models that mix recurrent layers with attention: their modules and the shape of their states."""

from __future__ import annotations

from typing import Any

from worker.formats.recurrence import LINEAR, Recurrence
from worker.kv.base import StateLayout
from worker.models.recurrent.gated_delta import GatedDelta


def install(model: Any, recurrent: Recurrence) -> None:
    """Replace the recurrent layers' modules, which hold this rank's weights, by Furrow's. Layers with attention are
    numbered among themselves: only they have keys and values."""
    attention = delta = 0
    for layer, kind in zip(model.model.layers, recurrent.kinds, strict=True):
        if kind == LINEAR:
            layer.linear_attn = GatedDelta(layer.linear_attn, model.config, delta, recurrent.tiled)
            delta += 1
        else:
            layer.self_attn.layer_idx = attention
            attention += 1


def state_layout(recurrent: Recurrence, ranks: int) -> StateLayout:
    """The state of a sequence on one of `ranks` ranks."""
    return StateLayout(
        layers=recurrent.layers,
        window=recurrent.taps - 1,
        channels=sum(recurrent.regions) // ranks,
        heads=recurrent.value_heads // ranks,
        key_dim=recurrent.key_dim,
        value_dim=recurrent.value_dim,
    )
