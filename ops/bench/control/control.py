"""The time that the control plane adds to a step, alone and overlapped with a step's work."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from control.redis.clients import SyncRedis
from control.redis.connection import connect
from ops.bench import program
from ops.bench.common.machine import describe
from ops.bench.common.redis_traffic import traffic
from ops.bench.common.summary import median
from ops.bench.control.counting import counting
from ops.bench.control.outside import outside
from ops.bench.control.stepping import Metronome, Turn, stepping
from ops.bench.control.work import hashing, timed
from ops.local.embedded import EmbeddedServer
from worker.leader.serving import REPEAT_WITHIN_S

ALONE_MS = {1: 0.3, 8: 0.3, 64: 0.8}
"""The most that a step may spend on Redis with nothing overlapped, by rows."""
STEP_S = 0.004
BESIDE = 0.03
"""The most that Redis may add to a step of STEP_S."""
WARM_UP = 50
ROUNDS = 5


@click.command()
@click.option("--steps", type=click.IntRange(20), default=1_000, show_default=True, help="Measured steps of each kind.")
@click.option("--tp", type=click.IntRange(1), multiple=True, default=(1, 2), show_default=True, help="Ranks.")
def control(steps: int, tp: tuple[int, ...]) -> None:
    """Run the leader's real step loop on a private server, around an engine that costs nothing or 4 ms.

    Other ranks are processes that acknowledge at once. Then steps with and without counting for Prometheus run in
    turns. At the end the demonstration model runs in that loop: what a step takes outside its forward. Exit status 1
    where a limit is missed.
    """
    click.echo(f"{describe()}\n{steps} steps each, medians")
    missed = 0
    with tempfile.TemporaryDirectory(prefix="furrow-bench-") as folder, EmbeddedServer(Path(folder)) as url:
        client = connect(url)
        for ranks in tp:
            click.echo(f"\nranks: {ranks}; a step that costs nothing, nothing overlapped")
            missed += sum(not alone(client, url, rows, steps, ranks) for rows in ALONE_MS)
            click.echo(f"ranks: {ranks}; beside a step of {1000 * STEP_S:g} ms")
            missed += sum(not beside(url, rows, steps, ranks) for rows in ALONE_MS)
        click.echo("")
        missed += not counting(url, steps)
        missed += not outside(url, steps)
        client.close()
    if missed:
        raise SystemExit(1)


def alone(client: SyncRedis, url: str, rows: int, steps: int, tp: int) -> bool:
    """Print where the time of a step that costs nothing goes, and its traffic; whether the limit is held."""
    engine = Metronome(tp, lambda: None)
    with stepping(url, rows, steps + WARM_UP, engine, overlap=False) as loop:
        loop.turns(WARM_UP)
        before = traffic(client)
        turns = loop.turns(steps)
        per_step = {name: (count - before[name]) / steps for name, count in traffic(client).items()}
    spent = 1000 * median([turn.control for turn in turns])
    click.echo(
        f"  {rows:>3} rows: {verdict(spent, ALONE_MS[rows])} ms"
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
    return spent <= ALONE_MS[rows]


def beside(url: str, rows: int, steps: int, tp: int) -> bool:
    """Print what Redis adds to a step that has work to do; whether the limit is held.

    Added are the loop's waits, sending included, and what the server's work takes from the step's: that is timed with
    and without it in turns, so that a change of the machine's mood meets both. With several ranks a command has as
    many steps as on a farm, and its figures are shared out among them.
    """
    work = hashing(STEP_S)
    turns: list[Turn] = []
    bare: list[float] = []
    engine, most = Metronome(tp, work), (1 + round(REPEAT_WITHIN_S / STEP_S)) * (steps + WARM_UP)
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
        f"  {rows:>3} rows: {verdict(100 * share, 100 * BESIDE)} %  (waits {1000 * waited:.3f} ms a step,"
        f" {forwards:g} steps a command; the work slowed by {1000 * slowed:.3f} ms of {1000 * median(bare):.3f});"
        f" the leader's own books {ms(turns, lambda turn: turn.books / turn.forwards.count)} ms"
    )
    return share <= BESIDE


def verdict(value: float, limit: float) -> str:
    return f"{value:.3f} (limit {limit:g}{'' if value <= limit else ', MISSED'})"


def ms(turns: list[Turn], part: Callable[[Turn], float]) -> str:
    return f"{1000 * median([part(turn) for turn in turns]):.3f}"


if __name__ == "__main__":
    program.run(control)
