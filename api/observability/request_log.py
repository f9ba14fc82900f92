"""The log lines of requests: warnings while they wait for a token, and exactly one terminal line for each."""

from __future__ import annotations

import time
from itertools import islice, takewhile
from typing import Protocol

import structlog

from api.asgi.tasks import PeriodicTask
from api.observability.metrics import Metrics
from api.rendering.chunks import Usage
from control.clock import now_ms

log = structlog.stdlib.get_logger(__name__)


class RequestLog:
    """Measures one request and writes its lines. `end` may be called more than once: the first call counts."""

    def __init__(self, metrics: Metrics, *, path: str, client_request_id: str | None) -> None:
        self._metrics = metrics
        self._started = time.perf_counter()
        self._first: float | None = None
        self._warned = 0.0
        self._facts: dict[str, object] = {"path": path}
        if client_request_id:
            self._facts["client_request_id"] = client_request_id
        self.received_ms = now_ms()
        self.ended = False

    def know(self, **facts: object) -> None:
        """Facts for every later line: rid, model, tenant, prompt_tokens …"""
        self._facts.update(facts)

    @property
    def waited(self) -> float:
        """Seconds since the request came."""
        return time.perf_counter() - self._started

    def first_token(self) -> None:
        if self._first is None:
            self._first = self.waited
            self._metrics.first_token(self._first)

    @property
    def before_first_token(self) -> bool:
        return self._first is None

    @property
    def waits(self) -> bool:
        """True until the first token or the end."""
        return self._first is None and not self.ended

    def warn_if_waiting(self, every_s: float, position: int | None) -> None:
        """Log that no token has come yet, at most once in `every_s` seconds."""
        if self._first is not None or self.waited - self._warned < every_s:
            return
        self._warned = self.waited
        log.warning(
            "request waits",
            action="request_waits",
            waited_ms=round(self.waited * 1000),
            queue_position=position,
            **self._facts,
        )

    def warned(self, texts: list[str]) -> None:
        """Log the warnings that the response's header has."""
        log.warning("request was taken in part", action="request_warned", warnings=texts, **self._facts)

    def unexpected(self, error: Exception) -> None:
        """Log an unexpected error with its traceback."""
        log.error("request failed unexpectedly", action="http_error", exc_info=error, **self._facts)

    def end(
        self, *, status: int, finish_reason: str | None, usage: Usage | None = None, error: str | None = None
    ) -> None:
        """The terminal line. `status` is what the client saw, 499 where it left; `usage` is None before a token."""
        if self.ended:
            return
        self.ended = True
        self._metrics.request_ended(status, usage, self.waited)
        log.info(
            "request ended",
            action="request_ended",
            **{"rid": None, "model": None, "prompt_tokens": None, **self._facts},
            status=status,
            completion_tokens=usage.completion_tokens if usage is not None else 0,
            cached_tokens=usage.cached_tokens if usage is not None else 0,
            finish_reason=finish_reason,
            ttft_ms=None if self._first is None else round(self._first * 1000, 1),
            total_ms=round(self.waited * 1000, 1),
            error=error,
        )


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
    """Logs the requests of this process without a token: one line each for the oldest of a model, and one for all where
    there are more."""

    def __init__(self, every_s: float) -> None:
        """`every_s`: seconds of waiting before the first line, and between two lines."""
        self._every_s = every_s
        self._waiting: dict[str, dict[RequestLog, Waiting]] = {}
        """By model, from the oldest on."""
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
