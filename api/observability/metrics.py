"""The counters of one API process as Prometheus text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from api.rendering.chunks import Usage
from control.replicas.health.memory import ServerMemory

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Histogram:
    """Counts of seconds in fixed buckets."""

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = [0] * (len(_BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        index = next((index for index, bound in enumerate(_BUCKETS) if seconds <= bound), len(_BUCKETS))
        self._counts[index] += 1
        self._sum += seconds

    def lines(self) -> list[str]:
        lines = [f"# HELP {self._name} {self._text}", f"# TYPE {self._name} histogram"]
        total = 0
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{self._name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{self._name}_sum {self._sum}", f"{self._name}_count {total}"]


class Metrics:
    def __init__(self) -> None:
        self._statuses: Counter[int] = Counter()
        self._tokens = self._prompt_tokens = self._cached_tokens = 0
        self._ttft = Histogram(
            "furrow_api_first_token_seconds", "From the request to its first token, at this process."
        )
        self._total = Histogram("furrow_api_request_seconds", "From the request to its end, at this process.")

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def request_ended(self, status: int, usage: Usage | None, seconds: float) -> None:
        self._statuses[status] += 1
        if usage is not None:
            self._tokens += usage.completion_tokens
            self._prompt_tokens += usage.prompt_tokens
            self._cached_tokens += usage.cached_tokens
        self._total.observe(seconds)

    def render(self, followed: int, servers: Sequence[ServerMemory] = ()) -> str:
        lines = ["# HELP furrow_api_requests_total Requests that ended, by status (499: the client left)."]
        lines += ["# TYPE furrow_api_requests_total counter"]
        lines += [
            f'furrow_api_requests_total{{status="{code}"}} {count}' for code, count in sorted(self._statuses.items())
        ]
        lines += ["# TYPE furrow_api_completion_tokens_total counter"]
        lines += [f"furrow_api_completion_tokens_total {self._tokens}"]
        lines += ["# HELP furrow_api_prompt_tokens_total Prompt tokens of requests that got a first token."]
        lines += ["# TYPE furrow_api_prompt_tokens_total counter"]
        lines += [f"furrow_api_prompt_tokens_total {self._prompt_tokens}"]
        lines += ["# HELP furrow_api_cached_prompt_tokens_total Those of them that were not computed again."]
        lines += ["# TYPE furrow_api_cached_prompt_tokens_total counter"]
        lines += [f"furrow_api_cached_prompt_tokens_total {self._cached_tokens}"]
        lines += ["# TYPE furrow_api_followed_requests gauge", f"furrow_api_followed_requests {followed}"]
        lines += [
            "# HELP furrow_redis_used_bytes Memory that Redis uses; beyond furrow_redis_max_bytes it refuses requests."
        ]
        lines += ["# TYPE furrow_redis_used_bytes gauge"]
        lines += [f'furrow_redis_used_bytes{{server="{server.address}"}} {server.used}' for server in servers]
        lines += ["# HELP furrow_redis_max_bytes Its maxmemory; 0: none is set.", "# TYPE furrow_redis_max_bytes gauge"]
        lines += [f'furrow_redis_max_bytes{{server="{server.address}"}} {server.most}' for server in servers]
        return "\n".join([*lines, *self._ttft.lines(), *self._total.lines()]) + "\n"
