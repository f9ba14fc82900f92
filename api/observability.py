"""The reports of an API process on its requests: metrics, warnings while they wait for a token, one line at the end,
and records of ended requests for the farm.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, takewhile
from typing import Protocol

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from api.http.tasks import PeriodicTask
from api.schemas.answers import TokenCounts
from control.clock import now_ms
from control.errors import RedisFull, RedisUnavailable
from control.records.api_reports import LONGEST_ERROR, EndedRequest, note
from control.redis.clients import AsyncRedis
from control.redis.connection import arun_every
from control.redis.servers import ServerMemory

log = structlog.stdlib.get_logger(__name__)

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

disable_created_metrics()


class Metrics:
    """One registry a process, so that tests may have several."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._ended = Counter(
            "furrow_api_requests",
            "Requests that ended, by status (499: the client left).",
            ["status"],
            registry=registry,
        )
        self._tokens = Counter(
            "furrow_api_completion_tokens", "Generated tokens of requests that ended.", registry=registry
        )
        self._prompt_tokens = Counter(
            "furrow_api_prompt_tokens", "Prompt tokens of requests that got a first token.", registry=registry
        )
        self._cached_tokens = Counter(
            "furrow_api_cached_prompt_tokens", "Those of them that were not computed again.", registry=registry
        )
        self._followed = Gauge(
            "furrow_api_followed_requests", "Answers that this process follows now.", registry=registry
        )
        self._redis_used = Gauge(
            "furrow_redis_used_bytes",
            "Memory that Redis uses; beyond furrow_redis_max_bytes it refuses requests.",
            ["server"],
            registry=registry,
        )
        self._redis_max = Gauge(
            "furrow_redis_max_bytes", "Its maxmemory; 0: none is set.", ["server"], registry=registry
        )
        self._first_token = Histogram(
            "furrow_api_first_token_seconds",
            "From the request to its first token, at this process.",
            buckets=_BUCKETS,
            registry=registry,
        )
        self._whole = Histogram(
            "furrow_api_request_seconds",
            "From the request to its end, at this process.",
            buckets=_BUCKETS,
            registry=registry,
        )

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def request_ended(self, status: int, usage: TokenCounts | None, seconds: float) -> None:
        self._ended.labels(str(status)).inc()
        if usage is not None:
            self._tokens.inc(usage.completion_tokens)
            self._prompt_tokens.inc(usage.prompt_tokens)
            self._cached_tokens.inc(usage.cached_tokens)
        self._whole.observe(seconds)

    def render(self, followed: int, servers: Sequence[ServerMemory] = ()) -> str:
        """Prometheus text: the counts, `followed` answers, the memory of the Redis servers, and of this process."""
        self._followed.set(followed)
        for server in servers:
            self._redis_used.labels(server.address).set(server.used)
            self._redis_max.labels(server.address).set(server.most)
        return generate_latest(self._registry).decode()


class RequestLog:
    """Measures one request and writes its lines. `end` may be called more than once: the first call counts."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        path: str,
        client_request_id: str | None,
        note_end: Callable[[EndedRequest], object] | None = None,
    ) -> None:
        """`note_end` is called with the end of a request that has an id."""
        self._metrics = metrics
        self._note_end = note_end
        self.tenant = ""
        """Whose it is, once that is known."""
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
        self, *, status: int, finish_reason: str | None, usage: TokenCounts | None = None, error: str | None = None
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
        if self._note_end is not None and "rid" in self._facts:
            self._note_end(self._record(status, finish_reason, usage, error))

    def _record(
        self, status: int, finish_reason: str | None, usage: TokenCounts | None, error: str | None
    ) -> EndedRequest:
        def text(name: str) -> str:
            return str(self._facts.get(name) or "")

        prompt_tokens = self._facts.get("prompt_tokens")
        return EndedRequest(
            id=text("rid"),
            path=text("path"),
            status=status,
            ended_ms=now_ms(),
            total_ms=round(self.waited * 1000),
            model=text("model"),
            tenant=self.tenant,
            key=text("key"),
            finish_reason=finish_reason or "",
            prompt_tokens=prompt_tokens if isinstance(prompt_tokens, int) else 0,
            completion_tokens=usage.completion_tokens if usage is not None else 0,
            cached_tokens=usage.cached_tokens if usage is not None else 0,
            first_ms=None if self._first is None else round(self._first * 1000),
            error=(error or "")[:LONGEST_ERROR],
        )


_TICK_S = 0.5
LINES = 10
"""Requests of one model that have lines of their own; thousands of them would cost more than the requests."""


class WaitingRequest(Protocol):
    """A request without a token so far."""

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
        self._waiting: dict[str, dict[RequestLog, WaitingRequest]] = {}
        """By model, from the oldest on."""
        self._said_at: dict[str, float] = {}
        self._task = PeriodicTask("wait_log", self._look, _TICK_S)
        self.start = self._task.start
        self.stop = self._task.stop

    def add(self, request_log: RequestLog, waiting: WaitingRequest) -> None:
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


_EVERY_S = 1.0
_MOST = 200
"""Records of one round: where more requests end in a second, the newest are written."""
_STRANGERS = (401, 403)
"""Statuses of callers without access, which are not recorded: they could displace all other records."""


class EndReports:
    """Collects the records of ended requests, and writes them to Redis once a second."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._records = deque[EndedRequest](maxlen=_MOST)
        self._task = PeriodicTask("ended_requests", self._run, _EVERY_S)
        self.start = self._task.start

    def note(self, record: EndedRequest) -> None:
        """The request has ended."""
        if record.status not in _STRANGERS:
            self._records.append(record)

    async def stop(self) -> None:
        """Write the remaining records, if Redis takes them."""
        await self._task.stop()
        with contextlib.suppress(RedisUnavailable, RedisFull):
            await self._run()

    async def _run(self) -> None:
        if not self._records:
            return
        records = [*self._records]
        self._records.clear()
        with contextlib.suppress(RedisFull):  # nothing depends on them
            await arun_every(self._client, note(records))
