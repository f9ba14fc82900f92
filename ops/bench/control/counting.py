"""The time that counting for Prometheus adds to a step, with it and without it in turns."""

from __future__ import annotations

import time
from collections.abc import Iterable

import click

from control.requests import Emission
from ops.bench.common.summary import median
from ops.bench.control.stepping import Metronome, stepping
from ops.bench.control.work import hashing
from worker.leader.request import RunningRequest
from worker.leader.request_counters import RequestCounters
from worker.rank.counters import Counters

STEP_S = 0.004
LIMIT = 0.01
"""The most that counting may add to a step of STEP_S."""
ROWS = (1, 64)
PARTS = 10
WARM_UP = 50


class EveryOther(RequestCounters):
    """Counts in every other step, so that the machine's mood meets both."""

    def __init__(self, counters: Counters) -> None:
        super().__init__(counters)
        self.counts = False
        self.counted: list[bool] = []
        """Of each step whose tokens Redis took."""
        self.times: list[float] = []
        """Seconds of processor time that counting took, of each step that was counted."""

    def accepted(self, rows: Iterable[tuple[RunningRequest, Emission]], now_ms: int) -> None:
        self.counts = not self.counts
        self.counted.append(self.counts)
        if self.counts:
            began = time.thread_time()
            super().accepted(rows, now_ms)
            self.times.append(time.thread_time() - began)

    def load(self, running: int, kv_usage: float) -> None:
        if self.counts:
            super().load(running, kv_usage)


def counting(url: str, steps: int) -> bool:
    """Print what counting adds to a step of 4 ms on one rank, each step with an emission; True if the limit holds."""
    held = True
    for rows in ROWS:
        added, alone = _added(url, rows, steps)
        share = median(added) / STEP_S
        held &= share <= LIMIT
        click.echo(
            f"counting, {rows:>3} rows: {100 * share:.2f} (limit {100 * LIMIT:g}{'' if share <= LIMIT else ', MISSED'})"
            f" % of a step of {1000 * STEP_S:g} ms ({1e6 * median(added):.0f} µs; {PARTS} parts:"
            f" {1e6 * min(added):.0f} to {1e6 * max(added):.0f}; processor time of the counting {1e6 * alone:.0f} µs)"
        )
    return held


def _added(url: str, rows: int, steps: int) -> tuple[list[float], float]:
    """Seconds that counting adds to a step, in each of PARTS parts, and the processor time of the counting alone."""
    part, added, alone = max(2, steps // PARTS), list[float](), list[float]()
    with stepping(url, rows, PARTS * (part + 1) + WARM_UP, Metronome(1, hashing(STEP_S)), overlap=True) as loop:
        loop.turns(WARM_UP)
        for _ in range(PARTS):
            loop.running.counters = counters = EveryOther(Counters())
            turns = loop.turns(part + 1)[1:]  # the first has no answer of Redis to take
            spent: dict[bool, list[float]] = {True: [], False: []}
            for turn, counted in zip(turns, counters.counted, strict=False):  # the last answer follows the last step
                spent[counted].append(turn.whole - turn.forwards.work)
            added.append(median(spent[True]) - median(spent[False]))
            alone += counters.times
    return added, median(alone)
