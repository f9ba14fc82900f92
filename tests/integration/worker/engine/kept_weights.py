"""Loads with a cache of packed weights, and what the tests read of their outcome."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from structlog.testing import capture_logs
from torch import Tensor

from tests.integration.worker.engine.ranks import play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.test_loading import Membership
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.served import ServedModel
from worker.tensors import as_tensor
from worker.weights.cache import WeightCache
from worker.weights.structure import taken_apart

Checkpoint = Callable[[str], Path]
HIT, DAMAGED, KEPT, NOT_KEPT = (
    "packed weights read from the cache",
    "packed weights are damaged",
    "packed weights kept",
    "packed weights not kept",
)

STEPS = write([Job(1, list(range(3, 40)), 16, 4)])


def loaded(source: Path, quant: str | None = "int8", rank: int = 0, ranks: int = 1) -> tuple[ServedModel, list[str]]:
    """The model, and the events that its load logged, once what was kept is written."""
    cache = WeightCache(2**30, least=0)
    with capture_logs() as logs:
        group: Any = Solo() if ranks == 1 else Membership(rank, ranks)
        model = load(source, collective=group, dtype="float32", quant=quant, cache=cache)
        if cache.writing is not None:
            cache.writing.join(30)
    return model, [entry["event"] for entry in logs]


def logits(model: ServedModel) -> Tensor:
    return torch.stack(play(Engine(model, SlabStore(model.cache_layout, 256), Solo()), STEPS).logits[1])


def memory(model: ServedModel) -> list[Tensor]:
    """All arrays, in order, as tensors."""
    return [as_tensor(array) for array in taken_apart(next(iter(model.parts())))[1]]


def the_file(folder: Path) -> Path:
    [found] = folder.iterdir()
    return found
