"""Models that mix recurrent layers with attention: their modules in torch."""

from __future__ import annotations

from typing import Any

from worker.collective.base import Link
from worker.families.mamba import Mamba
from worker.families.recurrence import DeltaRule, Recurrence, attends, recurs
from worker.families.short_convolution import ShortConvolution
from worker.models.torch.recurrent.gated_convolution import GatedConvolution
from worker.models.torch.recurrent.gated_delta import GatedDelta
from worker.models.torch.recurrent.mamba import MambaLayer


def install(model: Any, recurrent: Recurrence, link: Link) -> None:
    """Replace the recurrent layers' modules, which hold this rank's weights, by Furrow's. Layers with attention are
    numbered among themselves: only they have keys and values."""
    attention = number = 0
    for layer, kind in zip(model.model.layers, recurrent.kinds, strict=True):
        if recurs(kind):
            match recurrent:
                case DeltaRule():
                    layer.linear_attn = GatedDelta(layer.linear_attn, model.config, number, recurrent.tiled)
                case ShortConvolution():
                    layer.conv = GatedConvolution(layer.conv, number)
                case Mamba():
                    name = "mixer" if hasattr(layer, "mixer") else "mamba"
                    loaded = getattr(layer, name)
                    setattr(layer, name, MambaLayer(loaded, model.config, recurrent, number, link))
                case _:
                    raise NotImplementedError(type(recurrent).__name__)
            number += 1
        if attends(kind):
            attending = layer.mixer if hasattr(layer, "mixer") else layer.self_attn
            attending.layer_idx = attention
            attention += 1
