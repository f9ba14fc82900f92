"""The wall clock of this machine, in the unit of every time that Redis holds."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Milliseconds since 1970."""
    return int(time.time() * 1000)
