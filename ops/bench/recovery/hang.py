"""Ranks stopped under load: the time until each is detected, and no false alarm on a busy machine."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import click

from control.keys import ModelKeys
from control.redis.connection import run as call
from control.replicas import health
from ops.bench.recovery.recovery import Scene, Strike, finished, scene, strike, submit, wait_until_whole
from ops.harness.farm import DEMO, say
from ops.harness.program import Figure, benchmark, run, summarise

LEAST_S = 2.0
"""Found within this, or within STEPS times the p99 of a step where that is longer."""
STEPS = 10


@benchmark
def hang(
    streams: int = 64,
    times: Annotated[int, "Stops of each of the two ranks."] = 20,
    calm: Annotated[float, "Seconds of load that must pass without an alarm."] = 20.0,
    burners: Annotated[int, click.IntRange(0), "Processes that burn CPU in those seconds."] = 4,
) -> list[Figure]:
    """Send SIGSTOP to ranks of a private farm (demo, two CPU ranks, float64).

    First the farm works on a machine that is too busy, where nobody may be taken for hung. Then each rank is stopped,
    and the time until its epoch is poisoned counts.
    """
    with scene() as farm:
        _, alarms = work(farm, streams, calm, burners)
        step_p99, _ = work(farm, streams, calm / 4, burners=0)
        strikes: list[Strike] = []
        for _ in range(times):
            for rank, name in ((0, "leader"), (1, "rank 1")):
                struck = strike(farm, streams, rank, signal.SIGSTOP)
                strikes.append(struck)
                say(f"{name} stopped: found after {struck.detected_s:.2f} s, next token after {struck.gap_s:.2f} s")
    detected = summarise([s.detected_s for s in strikes])
    gap = summarise([s.gap_s for s in strikes])
    click.echo(
        f"found: p50 {detected.p50:.2f} s, p99 {detected.p99:.2f} s; "
        f"next token: p50 {gap.p50:.2f} s, worst {gap.max:.2f} s"
    )
    click.echo(f"a step with {streams} rows: p99 {1000 * step_p99:.0f} ms")
    lost = sum(struck.streams - struck.same for struck in strikes)
    return [
        Figure(f"worst time to find a hang, of {len(strikes)}", detected.max, max(LEAST_S, STEPS * step_p99), "s"),
        Figure("streams that ended otherwise than undisturbed", lost, 0),
        Figure(f"false alarms in {calm:g} s beside {burners} burners", alarms, 0),
    ]


def work(farm: Scene, streams: int, seconds: float, burners: int) -> tuple[float, int]:
    """Keep the farm at work beside `burners`: (p99 of a step in s, epochs poisoned meanwhile).

    A step is what passes between two tokens of one request.
    """
    client = farm.client
    wait_until_whole(client)
    before = len(call(client, health.poison_history(DEMO, "r0")))
    gaps: list[float] = []
    until = time.monotonic() + seconds
    with burning(burners):
        while not gaps or time.monotonic() < until:
            rids = [submit(client, farm.prompt) for _ in range(streams)]
            gaps += token_gaps(farm, rids[0])
            finished(client, rids)
    return summarise(gaps).p99, len(call(client, health.poison_history(DEMO, "r0"))) - before


def token_gaps(farm: Scene, rid: str) -> list[float]:
    """Seconds between the tokens of a request that runs, as its events arrive in Redis's log."""
    gaps: list[float] = []
    tokens = 0
    at = time.monotonic()
    while tokens < len(farm.expected):
        length = farm.client.xlen(ModelKeys(DEMO).log(rid))
        now = time.monotonic()
        if length > tokens:
            if tokens:
                gaps.append((now - at) / (length - tokens))
            tokens = length
            at = now
        time.sleep(0.002)
    return gaps


@contextmanager
def burning(count: int) -> Generator[None]:
    """That many processes that want a processor all the time."""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


if __name__ == "__main__":
    run(hang)
