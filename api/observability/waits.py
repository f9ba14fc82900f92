"""Log lines about requests that have no token yet: one each for the oldest of a model, and one for all where there are
more."""

from __future__ import annotations

import time
from itertools import islice, takewhile
from typing import Protocol

import structlog

from api.asgi.tasks import PeriodicTask
from api.observability.request_log import RequestLog

log = structlog.stdlib.get_logger(__name__)

_TICK_S = 0.5
LINES = 10
"""Requests of one model that have lines of their own; thousands of them would cost more than the requests."""


class Waiting(Protocol):
    """What a request is waiting for."""

    @property
    def model(self) -> str: ...

    @property
    def position(self) -> int | None:
        """Its place in the queue; None where it is not known, and once it was claimed."""


class WaitLog:
    """The requests of this process without a token, by model, from the oldest on."""

    def __init__(self, every_s: float) -> None:
        """`every_s`: seconds of waiting before the first line, and between two lines."""
        self._every_s = every_s
        self._waiting: dict[str, dict[RequestLog, Waiting]] = {}
        self._said_at: dict[str, float] = {}
        self._task = PeriodicTask("wait_log", self._look, _TICK_S)
        self.start, self.stop = self._task.start, self._task.stop

    def add(self, request_log: RequestLog, waiting: Waiting) -> None:
        """The request waits from now on, until its first token or its end."""
        self._waiting.setdefault(waiting.model, {})[request_log] = waiting

    async def _look(self) -> None:
        for model in list(self._waiting):
            self._look_at(model)

    def _look_at(self, model: str) -> None:
        waits = self._waiting[model]
        for request_log in [request_log for request_log in waits if not request_log.waits]:
            del waits[request_log]
        if not waits:
            del self._waiting[model]
            self._said_at.pop(model, None)
            return
        for request_log, waiting in islice(waits.items(), LINES):
            request_log.warn_if_waiting(self._every_s, waiting.position)
        oldest = next(iter(waits))
        young = sum(1 for _ in takewhile(self._is_young, reversed(waits)))
        now = time.monotonic()
        if len(waits) - young > LINES and now - self._said_at.get(model, 0.0) >= self._every_s:
            self._said_at[model] = now
            log.warning(
                "requests wait",
                action="requests_wait",
                model=model,
                count=len(waits) - young,
                waited_ms=round(oldest.waited * 1000),
            )

    def _is_young(self, request_log: RequestLog) -> bool:
        return request_log.waited < self._every_s
