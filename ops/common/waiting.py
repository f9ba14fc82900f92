"""Waiting for a condition, and between attempts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from control.errors import FurrowError

T = TypeVar("T")


class NotInTime(FurrowError):
    """A condition did not become true in time."""


def until(condition: Callable[[], T | None], event: str, seconds: float = 30.0, tick: float = 0.02) -> T:
    """Poll `condition` and return its first true value. Raises NotInTime naming `event`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise NotInTime(f"not within {seconds:g} s: {event}")
        time.sleep(tick)
    return value


def pause_after(failures: int, pauses: Sequence[float]) -> float:
    """Seconds before the next attempt after so many failures in a row; the last pause is repeated.

    >>> [pause_after(failures, (0.1, 0.5)) for failures in (1, 2, 3)]
    [0.1, 0.5, 0.5]
    """
    return pauses[min(failures, len(pauses)) - 1]
