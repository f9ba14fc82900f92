"""Figures: statistics of what was measured, and measured values beside their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """All but `count` are in the unit of the values."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def summarise(values: Sequence[float]) -> Summary:
    """Raises ValueError for an empty list: a figure made of nothing would look like a measurement."""
    if not values:
        raise ValueError("no values to summarise")
    ordered = sorted(values)
    p50, p95, p99 = (percentile(ordered, share) for share in (50, 95, 99))
    return Summary(len(ordered), math.fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest value that `share` percent of the sorted values do not exceed."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Figure:
    """Holds while `measured` is at most `limit`, or at least `limit` where `at_least`."""

    name: str
    measured: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def table(figures: Sequence[Figure]) -> str:
    """One line per figure, at most 100 wide where names are at most 48."""
    lines = [f"{'figure':<48}{'measured':>14}{'limit':>16}  verdict"]
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        limit = f"{sign} {_number(figure.limit, figure.unit)}"
        verdict = "holds" if figure.holds else "MISSED"
        lines.append(f"{figure.name:<48}{_number(figure.measured, figure.unit):>14}{limit:>16}  {verdict}")
    return "\n".join(lines)


def _number(value: float, unit: str) -> str:
    text = f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"
    return f"{text} {unit}".rstrip()
