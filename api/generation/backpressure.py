"""Repeats a fresh refusal by a full queue, without tokenising the prompt and asking Redis again."""

from __future__ import annotations

import time
from collections.abc import Callable

from control.errors import QueueFull

FRESH_S = 0.1
"""How long a refusal stands. Few enough places become free meanwhile that a queue worth waiting in doesn't run dry."""
_MOST = 4096


class Backpressure:
    """The refusals of the last moments, by model, tenant and class."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: dict[tuple[str, str, str], tuple[float, QueueFull]] = {}

    def note(self, model: str, tenant: str, priority: str, error: QueueFull) -> None:
        """Remember a refusal, unless it was for the request's own size: a smaller one may get in."""
        if error.bound == "tokens":
            return
        now = self._clock()
        if len(self._refused) >= _MOST:
            self._refused = {who: last for who, last in self._refused.items() if now - last[0] < FRESH_S}
        self._refused[model, tenant, priority] = now, error

    def check(self, model: str, tenant: str, priority: str) -> None:
        """Raises the QueueFull that still stands, if there is one."""
        at, error = self._refused.get((model, tenant, priority), (0.0, None))
        if error is not None and self._clock() - at < FRESH_S:
            raise QueueFull(error.model, error.queued, error.retry_after, error.bound)
