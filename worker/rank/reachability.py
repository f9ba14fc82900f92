"""Reachability of Redis. A missing heartbeat is evidence of a fault only if Redis was reachable all the time."""

from __future__ import annotations

import time
from collections.abc import Callable

from control.constants import HEARTBEAT_MS

GAP_S = 1.0
"""A longer time without a round trip is an absence: heartbeats and locks may have lapsed without a fault."""
GRACE_S = HEARTBEAT_MS / 1000
"""Default time after an absence in which a missing heartbeat is no evidence."""


class Reachability:
    """One loop's contact with Redis, noted at the end of each turn in which everything was answered."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, grace_s: float = GRACE_S) -> None:
        self._clock = clock
        self._grace_s = grace_s
        self._last: float | None = None
        self._grace_until = 0.0

    def note(self) -> float:
        """Note a good turn; returns the seconds for which there was no contact before it, 0 if that was no absence."""
        now = self._clock()
        gap = now - self._last if self._last is not None else 0.0
        self._last = now
        if gap <= GAP_S:
            return 0.0
        self._grace_until = now + self._grace_s
        return gap

    def start_grace(self) -> None:
        """Start with a grace: what went on before this loop began is not known."""
        self._last = self._clock()
        self._grace_until = self._last + self._grace_s

    @property
    def steady(self) -> bool:
        """True if a missing heartbeat is evidence: Redis is reachable, and was a moment ago."""
        now = self._clock()
        return self._last is None or (now - self._last <= GAP_S and now >= self._grace_until)
