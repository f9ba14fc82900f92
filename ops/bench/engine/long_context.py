"""A step of one sequence with a long context, by the type of its cached keys and values, in turns.

The context is not computed: its keys and values are random numbers, as far apart in memory as real ones.
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Annotated

import click
import numpy as np

from ops.harness.program import PATH, Figure, ModelsFolder, Outcome, Quant, Shape, benchmark, models_of, run
from worker.collective import Solo
from worker.kv.base import STORED_TYPES, CacheLayout, Extent
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.served import Row, ServedModel, flatten
from worker.repository.files import inspect

LIMITS = {"f16": 1.3, "q8_0": 1.3}
"""Times the speed with float32."""


class LongContext:
    """A model and a sequence of `positions` random keys and values."""

    def __init__(self, model: ServedModel, positions: int, steps: int) -> None:
        assert isinstance(model.cache_layout, CacheLayout)
        self._model = model
        self._store = SlabStore(model.cache_layout, positions + steps)
        self._length = positions
        extent = Extent(0, 0, positions)
        [slab] = self._store.begin([extent]).slabs
        generator = np.random.default_rng(0)
        for memory in slab.pool.memories:
            one = memory[:, :, slab.slot]
            if memory.dtype.kind == "f":
                one[:] = generator.standard_normal(one.shape[-2:], np.float32)
            else:  # bytes and the scales behind them, or bfloat16: small numbers
                one[:] = generator.integers(0, 64, one.shape[-2:], np.uint8)
        self._store.commit([extent])

    def step(self) -> float:
        """Seconds of a step."""
        row = Row(0, [1], self._length, True)
        began = time.perf_counter()
        self._model.forward(flatten([row], self._store.begin([row.extent])))
        seconds = time.perf_counter() - began
        self._store.commit([row.extent])
        self._length += 1
        return seconds


@benchmark
def long_context(
    shape: Shape = "tiny",
    folder: ModelsFolder = None,
    model: Annotated[Path | None, PATH, "Or this model: a folder or a GGUF file."] = None,
    quant: Quant = None,
    positions: int = 16_384,
    steps: int = 24,
    types: Annotated[tuple[str, ...], "--kv-type", click.Choice(list(STORED_TYPES))] = ("f32", "f16", "q8_0"),
) -> Outcome:
    """Median and fastest step with each type."""
    click.echo(f"{model.name if model else shape} {quant or ''}, {positions} positions")
    with models_of(shape, folder) as models:
        files = inspect(model or models.checkpoint())
        contexts = {
            one: LongContext(load(files, collective=Solo(), quant=quant, kv_type=one), positions, steps)
            for one in types
        }
        seconds = {one: list[float]() for one in types}
        for _ in range(steps):
            for one, context in contexts.items():
                seconds[one].append(context.step())
    for one, taken in seconds.items():
        click.echo(f"{one:<6}{1 / median(taken):>8.1f} tokens/s, at best {1 / min(taken):.1f}")
    if "f32" not in seconds:
        return Outcome(details={"seconds": seconds})
    exact = median(seconds["f32"])
    ratios = {one: exact / median(seconds[one]) for one in types if one in LIMITS}
    figures = [Figure(f"{one} / f32, speed", ratio, LIMITS[one], at_least=True) for one, ratio in ratios.items()]
    return Outcome(figures, {"seconds": seconds})


if __name__ == "__main__":
    run(long_context)
