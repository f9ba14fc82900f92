"""The time that the control plane adds to a step, alone and overlapped with a step's work."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from statistics import median
from typing import Annotated

import click

from control.commands import ErrorReply, GenerateStep
from control.errors import SettingsError
from control.redis.clients import SyncRedis
from control.redis.connection import connect
from ops.bench.control.stepping import MODEL, Clocked, Forwards, Metronome, Turn, hashing, load_command, stepping, timed
from ops.demo import MODEL_DIR
from ops.harness.farm import private_redis, traffic
from ops.harness.program import Figure, benchmark, run
from worker.engine.step import Step
from worker.leader.serving import REPEAT_WITHIN_S

ALONE_MS = {1: 0.3, 8: 0.3, 64: 0.8}
"""The most that a step may spend on Redis with nothing overlapped, by rows."""
STEP_S = 0.004
BESIDE = 0.03
"""The most that Redis may add to a step of STEP_S."""
WARM_UP = 50
ROUNDS = 5
OUTSIDE_ROWS = 64
OUTSIDE_MS = 2.0


@benchmark
def control(
    steps: Annotated[int, click.IntRange(20), "Measured steps of each kind."] = 1_000,
    tp: Annotated[tuple[int, ...], "Ranks."] = (1, 2),
) -> list[Figure]:
    """Run the leader's real step loop on a private server, around an engine that costs nothing or 4 ms.

    Other ranks are processes that acknowledge at once. At the end the demonstration model runs in that loop: what a
    step takes outside its forward. Exit status 1 where a limit is missed.
    """
    click.echo(f"{steps} steps each, medians")
    figures: list[Figure] = []
    with private_redis() as (_, url), connect(url) as client:
        for ranks in tp:
            click.echo(f"ranks: {ranks}; a step that costs nothing, nothing overlapped")
            figures += [alone(client, url, rows, steps, ranks) for rows in ALONE_MS]
            click.echo(f"ranks: {ranks}; beside a step of {1000 * STEP_S:g} ms")
            figures += [beside(url, rows, steps, ranks) for rows in ALONE_MS]
        figures.append(outside(url, steps))
    return figures


def alone(client: SyncRedis, url: str, rows: int, steps: int, tp: int) -> Figure:
    """Print where the time of a step that costs nothing goes, and its traffic."""
    engine = Metronome(tp, lambda: None)
    with stepping(url, rows, steps + WARM_UP, engine, overlap=False) as loop:
        loop.turns(WARM_UP)
        before = traffic(client)
        turns = loop.turns(steps)
        per_step = {name: (count - before[name]) / steps for name, count in traffic(client).items()}
    redis_ms = 1000 * median([turn.control for turn in turns])
    click.echo(
        f"  {rows:>3} rows: {redis_ms:.3f} ms"
        f"  (emit + claim {ms(turns, lambda turn: turn.exchange)},"
        f" fan-out + replies {ms(turns, lambda turn: turn.control - turn.exchange)},"
        f" in the server's scripts {per_step['script_us'] / 1000:.3f});"
        f" the leader's own books {ms(turns, lambda turn: turn.books)} ms"
    )
    click.echo(
        f"            a step: {per_step['sent']:.1f} commands sent, {per_step['all'] - per_step['sent']:.0f} more in"
        f" scripts, {per_step['in']:.0f} bytes in, {per_step['out']:.0f} out;"
        f" a token: {(per_step['in'] + per_step['out']) / rows:.0f} bytes, {per_step['all'] / rows:.1f} commands"
    )
    return Figure(f"{tp} ranks, {rows} rows: a step on Redis alone", redis_ms, ALONE_MS[rows], "ms")


def beside(url: str, rows: int, steps: int, tp: int) -> Figure:
    """Print what Redis adds to a step that has work to do.

    Added are the loop's waits, sending included, and what the server's work takes from the step's: that is timed with
    and without it in turns, so that a change of the machine's speed affects both. With several ranks a command has as
    many steps as on a farm, and its figures are shared out among them.
    """
    work = hashing(STEP_S)
    turns: list[Turn] = []
    bare: list[float] = []
    engine = Metronome(tp, work)
    most = (1 + round(REPEAT_WITHIN_S / STEP_S)) * (steps + WARM_UP)
    with stepping(url, rows, most, engine, overlap=True, repeat=True) as loop:
        loop.turns(WARM_UP)
        for _ in range(ROUNDS):
            turns += loop.turns(steps // ROUNDS)[1:]  # the first of a round has nothing beside it
            bare += [timed(work) for _ in range(steps // ROUNDS)]
    forwards = median([turn.forwards.count for turn in turns])
    slowed = median([turn.forwards.work / turn.forwards.count for turn in turns]) - median(bare)
    waited = median([turn.control / turn.forwards.count for turn in turns])
    share = (slowed + waited) / median(bare)
    click.echo(
        f"  {rows:>3} rows: {100 * share:.3f} %  (waits {1000 * waited:.3f} ms a step,"
        f" {forwards:g} steps a command; the work slowed by {1000 * slowed:.3f} ms of {1000 * median(bare):.3f});"
        f" the leader's own books {ms(turns, lambda turn: turn.books / turn.forwards.count)} ms"
    )
    return Figure(f"{tp} ranks, {rows} rows: added to a step of 4 ms", 100 * share, 100 * BESIDE, "%")


def ms(turns: list[Turn], part: Callable[[Turn], float]) -> str:
    return f"{1000 * median([part(turn) for turn in turns]):.3f}"


# --- beside the forward -----------------------------------------------------------------------------------------------


class TimedEngine(Clocked):
    """The demonstration model on one CPU rank, as a leader runs it."""

    def __init__(self, kv_tokens: int) -> None:
        super().__init__(0, 1, "cpu")
        reply = self.answer(load_command(MODEL_DIR, MODEL, kv_tokens))
        if isinstance(reply, ErrorReply) or self._engine is None:
            raise SettingsError(f"the demonstration model can't be loaded: {reply}")
        self._forward = self._engine.model.forward
        self._forward_s = 0.0
        self._engine.model.forward = self._timed  # type: ignore[method-assign]

    def _timed(self, *arguments: object) -> object:
        started = time.perf_counter()
        logits = self._forward(*arguments)  # type: ignore[arg-type]
        self._forward_s += time.perf_counter() - started
        return logits

    @contextmanager
    def step(self, command: GenerateStep) -> Generator[Step]:  # type: ignore[override]
        self._forward_s = 0.0
        with super().step(command) as step:
            yield step
        self.steps.append(Forwards(step.forwards, self._forward_s))


def outside(url: str, steps: int) -> Figure:
    """A step's time beside its forward, with the overlaps of a real farm: the leader's loop, its sampler, its
    accounting, and Redis."""
    engine = TimedEngine(OUTSIDE_ROWS * (steps + 10 * WARM_UP))
    with stepping(url, OUTSIDE_ROWS, steps + WARM_UP, engine, overlap=True, gather=True) as loop:
        loop.turns(WARM_UP)
        turns = loop.turns(steps)
    outside_ms = 1000 * median([turn.whole - turn.forwards.work for turn in turns])
    forward = 1000 * median([turn.forwards.work for turn in turns])
    click.echo(
        f"demonstration model, {OUTSIDE_ROWS} rows: {outside_ms:.2f} ms a step outside the forward, which takes "
        f"{forward:.2f} ms"
    )
    return Figure(f"demo, {OUTSIDE_ROWS} rows: a step outside the forward", outside_ms, OUTSIDE_MS, "ms")


if __name__ == "__main__":
    run(control)
