"""The counts of a leader's requests, as metrics of other servers name them."""

from __future__ import annotations

from collections.abc import Iterable

from control.messages import LogEntry
from control.requests import Emission
from worker.leader.request import RunningRequest
from worker.rank import series
from worker.rank.counters import Counters

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

    def found_in_cache(self, tokens: int) -> None:
        """An engine whose answers don't say so has found these tokens in its prefix cache."""
        if tokens:
            self._counters.add(series.PREFIX_HITS, tokens)

    def accepted(self, rows: Iterable[tuple[RunningRequest, Emission]], now_ms: int) -> None:
        """Redis took the emissions at `now_ms` of its clock.

        Neighbours with equally many tokens since the same time are observed together: those are nearly all rows.
        """
        generated = times = each = since_ms = 0
        for request, emission in rows:
            tokens = 0
            for entry in emission.entries:
                if entry.token is not None:
                    tokens += 1
            if emission.seq == 1 and _has_result(emission):
                self._first(request, emission.entries[0], now_ms)
            elif tokens and request.emitted_ms:
                if request.emitted_ms != since_ms or tokens != each:
                    self._between(now_ms - since_ms, each, times)
                    since_ms = request.emitted_ms
                    each = tokens
                    times = 0
                times += 1
            if tokens:
                generated += tokens
                request.tokens += tokens
                request.emitted_ms = now_ms
            if emission.done is not None:
                self._ended(request, emission.entries, now_ms)
        self._between(now_ms - since_ms, each, times)
        if generated:
            self._counters.add(series.GENERATION_TOKENS, generated)

    def _between(self, gap_ms: int, tokens: int, times: int) -> None:
        """`times` emissions had `tokens` tokens, `gap_ms` after the one before."""
        if times:
            self._counters.observe(series.BETWEEN_TOKENS, gap_ms / 1000 / tokens, times * tokens)

    def _first(self, request: RunningRequest, entry: LogEntry, now_ms: int) -> None:
        counters = self._counters
        prompt = len(request.params.prompt)
        request.first_ms = now_ms
        counters.observe(series.TO_FIRST_TOKEN, _seconds(request.enqueued_ms, now_ms))
        counters.add(series.PROMPT_TOKENS, prompt)
        counters.add(series.PREFIX_QUERIES, prompt)
        counters.add(series.PREFIX_HITS, entry.cached or 0)

    def _ended(self, request: RunningRequest, entries: list[LogEntry], now_ms: int) -> None:
        counters = self._counters
        claimed = request.claimed_ms
        first = request.first_ms or now_ms
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


def _has_result(emission: Emission) -> bool:
    """True if its first entry is part of an answer."""
    return bool(emission.entries) and emission.entries[0].finish not in _WITHOUT_RESULT


def _seconds(since_ms: int, until_ms: int) -> float:
    return max(0, until_ms - since_ms) / 1000
