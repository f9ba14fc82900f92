"""Log lines about an outage of Redis: one at its begin, one every ten seconds with its length, one at its end.

The process has one Outage for all its loops. A loop reports each RedisUnavailable under its own name, and reports when
it continues; the Outage decides which reports become log lines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import structlog

log = structlog.stdlib.get_logger(__name__)

SAY_EVERY_S = 10.0


class Outage:
    """The loops that wait for Redis, and the time since the first of them waits. Safe to use from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: set[str] = set()
        self._since = self._reported_at = 0.0

    @property
    def seconds(self) -> float:
        """Time that the first of the waiting loops has waited; 0 while none waits."""
        with self._lock:
            return self._clock() - self._since if self._waiting else 0.0

    def waits(self, loop: str, error: Exception) -> None:
        """`loop` could not do its turn because of `error`, and will try again."""
        with self._lock:
            now = self._clock()
            first = not self._waiting
            self._waiting.add(loop)
            if first:
                self._since = self._reported_at = now
                log.warning("Redis is away; waiting for it", action="redis_away", loop=loop, error=str(error))
            elif now - self._reported_at >= SAY_EVERY_S:
                self._reported_at = now
                seconds = round(now - self._since)
                loops = sorted(self._waiting)
                log.warning("Redis is still away", action="redis_away", seconds=seconds, loops=loops, error=str(error))

    def goes_on(self, loop: str) -> None:
        """`loop` did its turn, or has ended. Takes no lock while no loop waits."""
        if not self._waiting:
            return
        with self._lock:
            if loop in self._waiting:
                self._waiting.discard(loop)
                if not self._waiting:
                    seconds = round(self._clock() - self._since, 1)
                    log.warning("Redis is back", action="redis_back", seconds=seconds)


outage = Outage()
"""The Outage of this process."""
