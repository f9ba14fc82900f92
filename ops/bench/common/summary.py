"""Median and percentiles of a list of durations."""

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
    """Raises ValueError for no values: a figure without data must never look like one."""
    if not values:
        raise ValueError("no values to summarise")
    ordered = sorted(values)
    at = [percentile(ordered, share) for share in (50, 95, 99)]
    return Summary(len(ordered), math.fsum(ordered) / len(ordered), at[0], at[1], at[2], ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest of the ascending values that at least `share` percent do not exceed (nearest rank): always one that
    was measured, and with few values p99 is the worst one."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


def median(values: Sequence[float]) -> float:
    """The middle value; the mean of the two middle ones where the count is even."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
