"""The description of a loaded shard by all that the bits of its logits depend on, besides the weights."""

from __future__ import annotations

import numpy as np

from control.commands import RankBackend
from worker.kv.base import WholeLayout
from worker.models.served import ServedModel


def describe(model: ServedModel) -> RankBackend:
    """This rank's part of `control.records.backend.Backend`."""
    return RankBackend(
        dtype=model.dtype.name,
        kv_type=_kv_type(model),
        kernels="; ".join(_kernels(model)),
        collective=model.collective.name,
        batch_invariant=model.batch_invariant,
    )


def _kv_type(model: ServedModel) -> str:
    """The type of stored keys and values; "" for a model without a cache."""
    layout = model.cache_layout
    if isinstance(layout, WholeLayout):
        return ""
    return layout.dtype.name if layout.stored is None else layout.stored.name


def _kernels(model: ServedModel) -> list[str]:
    """The programs and devices that compute. numpy samples on CPUs; torch has the whole forward, or a part: an image
    tower, a pooler."""
    if not model.uses_torch:
        return [*_compiled(model), f"numpy {np.__version__}"]
    from worker.models.torch.device import cpu, gpu  # only here: torch was imported for the model

    if model.device != "cpu":
        return gpu(model)
    return [*_compiled(model), f"numpy {np.__version__}", *cpu(model)]


def _compiled(model: ServedModel) -> list[str]:
    return [] if model.kernels is None else [model.kernels]
