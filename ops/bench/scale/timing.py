"""An act is made many times; its figures are told from what the server took for each call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import click

from ops.bench.common.figures import Figure
from ops.bench.scale.acts import Act
from ops.bench.scale.clock import ServerClock

ALONE = 20
"""Repeats of an act of which a call was too slow."""


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank: at most 1 - `share` of the values are greater.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5)
    2.0
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def head() -> str:
    """The line above rows."""
    return f"{'server time, ms':<48}{'p50':>8}{'p99.9':>8}{'worst':>8}{'calls':>8}"


def row(name: str, spent: Sequence[float]) -> str:
    """One line of the table: p50, p99.9 and worst time of the calls in ms, and their number."""
    values = median(spent), percentile(spent, 0.999), max(spent)
    return f"{name:<48}" + "".join(f"{value:>8.2f}" for value in values) + f"{len(spent):>8}"


def timed(clock: ServerClock, name: str, act: Act, times: int, limit: float) -> list[Figure]:
    """The p99.9 of the act's calls. Where one was beyond the limit the act is repeated alone, and their median counts
    too: it tells a script that is slow now and then from a machine that pauses."""
    clock.spent.clear()
    for index in range(times):
        act(index)
    spent = list(clock.spent)
    click.echo(row(name, spent))
    figures = [Figure(f"{name}, p99.9", percentile(spent, 0.999), limit, "ms")]
    if max(spent) > limit:
        clock.spent.clear()
        for index in range(times, times + ALONE):
            act(index)
        alone = list(clock.spent)
        click.echo(
            f"  worst {max(spent):.2f} ms; repeated alone: median {median(alone):.2f}, worst {max(alone):.2f} ms"
        )
        figures.append(Figure(f"{name}, alone, p50", median(alone), limit, "ms"))
    return figures
