"""Waiting for the thing itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(true: Callable[[], T], seconds: float = 40.0) -> T:
    """Poll until `true()` is, and return what it gave."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
    return found
