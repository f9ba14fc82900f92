"""The time of a step beside the forward: the leader's loop, its sampler, its accounting, and Redis."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import click

from control.commands import GenerateStep
from control.errors import SettingsError
from control.replies import ErrorReply
from ops.bench.common.summary import median
from ops.bench.control.shard import load_command
from ops.bench.control.stepping import MODEL, Clocked, Forwards, stepping
from ops.demo import MODEL_DIR
from worker.engine.step import Step

ROWS = 64
LIMIT_MS = 2.0
WARM_UP = 50


class Engine(Clocked):
    """The demonstration model on one CPU rank, as a leader runs it."""

    def __init__(self, kv_tokens: int) -> None:
        super().__init__(0, 1, "cpu")
        reply = self.answer(load_command(MODEL_DIR, MODEL, kv_tokens))
        if isinstance(reply, ErrorReply) or self._engine is None:
            raise SettingsError(f"the demonstration model can't be loaded: {reply}")
        self._forward, self._spent = self._engine.model.forward, 0.0
        self._engine.model.forward = self._timed  # type: ignore[method-assign]

    def _timed(self, *arguments: object) -> object:
        started = time.perf_counter()
        logits = self._forward(*arguments)  # type: ignore[arg-type]
        self._spent += time.perf_counter() - started
        return logits

    @contextmanager
    def step(self, command: GenerateStep) -> Generator[Step]:  # type: ignore[override]
        self._spent = 0.0
        with super().step(command) as step:
            yield step
        self.steps.append(Forwards(step.forwards, self._spent))


def outside(url: str, steps: int) -> bool:
    """Print a step's time beside its forward, with the overlaps of a real farm; True if the limit holds."""
    engine = Engine(ROWS * (steps + 10 * WARM_UP))
    with stepping(url, ROWS, steps + WARM_UP, engine, overlap=True, gather=True) as loop:
        loop.turns(WARM_UP)
        turns = loop.turns(steps)
    beside = 1000 * median([turn.whole - turn.forwards.work for turn in turns])
    forward = 1000 * median([turn.forwards.work for turn in turns])
    verdict = "" if beside <= LIMIT_MS else ", MISSED"
    click.echo(
        f"demonstration model, {ROWS} rows: {beside:.2f} (limit {LIMIT_MS:g}{verdict}) ms a step outside the forward,"
        f" which takes {forward:.2f} ms"
    )
    return beside <= LIMIT_MS
