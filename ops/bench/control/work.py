"""The work of a step without a model: a known amount of computation, and its time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

PROBE = 1 << 20
"""Bytes hashed to find out how fast that goes."""


def hashing(seconds: float) -> Callable[[], object]:
    """A step's computation, of about `seconds`: one call that leaves the interpreter to others while it computes, as a
    forward in C++ and waiting for a GPU do."""
    probe = bytes(PROBE)
    fastest = min(timed(lambda: hashlib.sha256(probe)) for _ in range(100))
    block = bytes(round(PROBE * seconds / fastest))
    return lambda: hashlib.sha256(block)


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
