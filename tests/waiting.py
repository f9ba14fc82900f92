"""Waiting for a condition, such as the end of processes."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import psutil

T = TypeVar("T")


def until(condition: Callable[[], T], seconds: float = 60.0) -> T:
    """Poll `condition` and return its first true value. Raises TimeoutError with the source of `condition`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {_source(condition)}")
        time.sleep(0.005)
    return value


def lives(process: psutil.Process) -> bool:
    """False for one that has ended, also where that happens meanwhile or its parent has not taken its status."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _source(condition: Callable[[], object]) -> str:
    try:
        return inspect.getsource(condition).strip()
    except (OSError, TypeError):  # a callable without a file
        return repr(condition)
