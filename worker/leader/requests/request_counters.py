"""The counts of a leader's requests, as Redis takes their tokens.

A request that survived a crash counts once: its first token and its end are counted by the leader that brought them.
"""

from __future__ import annotations

from control.messages import LogEntry
from control.requests import Emission
from worker.health.progress import Served
from worker.leader.requests.running import RunningRequest
from worker.metrics import series
from worker.metrics.counters import Counters

_REASONS = {"stop": 0, "tool_calls": 0, "length": 1, "cancelled": 2, "expired": 2}
_WITHOUT_RESULT = ("cancelled", "expired", "unavailable", "error")
_ERROR = series.REASONS.index("error")


class RequestCounters:
    """Writes the series that vLLM's servers have."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def load(self, running: int, kv_usage: float) -> None:
        """Note how many requests run, and the part of the KV memory that they hold."""
        self._counters.set(series.RUNNING, running)
        self._counters.set(series.KV_USAGE, kv_usage)

    def served(self) -> Served:
        """The counts that the leader's heartbeat tells; for any thread."""
        *firsts, seconds = self._counters.read(series.TO_FIRST_TOKEN)
        return Served(
            running=int(self._counters.read(series.RUNNING)[0]),
            tokens=int(self._counters.read(series.GENERATION_TOKENS)[0]),
            first_tokens=int(sum(firsts)),
            first_tokens_ms=int(1000 * seconds),
        )

    def accepted(self, request: RunningRequest, emission: Emission, now_ms: int) -> None:
        """Redis took the emission at `now_ms` of its clock."""
        entries = emission.entries
        tokens = sum([entry.token is not None for entry in entries])
        if entries and emission.seq == 1 and entries[0].finish not in _WITHOUT_RESULT:
            self._first(request, entries[0], now_ms)
        elif tokens and request.emitted_ms:
            self._counters.observe(series.BETWEEN_TOKENS, (now_ms - request.emitted_ms) / 1000 / tokens, tokens)
        if tokens:
            self._counters.add(series.GENERATION_TOKENS, tokens)
            request.tokens += tokens
            request.emitted_ms = now_ms
        if emission.done is not None:
            self._ended(request, entries, now_ms)

    def _first(self, request: RunningRequest, entry: LogEntry, now_ms: int) -> None:
        counters, prompt = self._counters, len(request.params.prompt)
        request.first_ms = now_ms
        counters.observe(series.TO_FIRST_TOKEN, _seconds(request.enqueued_ms, now_ms))
        counters.add(series.PROMPT_TOKENS, prompt)
        counters.add(series.PREFIX_QUERIES, prompt)
        counters.add(series.PREFIX_HITS, entry.cached or 0)

    def _ended(self, request: RunningRequest, entries: list[LogEntry], now_ms: int) -> None:
        counters, claimed, first = self._counters, request.claimed_ms, request.first_ms or now_ms
        finish = next((entry.finish for entry in reversed(entries) if entry.finish is not None), None)
        counters.add(series.SUCCESS, at=_REASONS.get(finish or "", _ERROR))
        counters.observe(series.WHOLE, _seconds(request.enqueued_ms, now_ms))
        counters.observe(series.QUEUED, _seconds(request.enqueued_ms, claimed))
        counters.observe(series.PREFILL, _seconds(claimed, first))
        counters.observe(series.DECODE, _seconds(first, now_ms))
        counters.observe(series.INFERENCE, _seconds(claimed, now_ms))
        counters.observe(series.REQUEST_PROMPT, len(request.params.prompt))
        counters.observe(series.REQUEST_GENERATION, request.tokens)
        if request.tokens > 1:
            counters.observe(series.PER_TOKEN, _seconds(first, now_ms) / (request.tokens - 1))


def _seconds(since_ms: int, until_ms: int) -> float:
    return max(0, until_ms - since_ms) / 1000
