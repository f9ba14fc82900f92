"""Waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from control.errors import FurrowError

T = TypeVar("T")


class NotInTime(FurrowError):
    """A condition did not become true in time."""


def until(condition: Callable[[], T | None], awaited: str, seconds: float = 30.0, tick: float = 0.02) -> T:
    """Poll `condition` and return its first true value. Raises NotInTime naming `awaited`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise NotInTime(f"not within {seconds:g} s: {awaited}")
        time.sleep(tick)
    return value
