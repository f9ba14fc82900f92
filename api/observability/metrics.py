"""The metrics of one API process."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from api.rendering.chunks import Usage
from control.replicas.health.memory import ServerMemory

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

    def request_ended(self, status: int, usage: Usage | None, seconds: float) -> None:
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
