"""A leader counts each request once: whichever leaders had it."""

from __future__ import annotations

from typing import Any

import pytest

from control.messages import FinishReason, GenerationRequest, LogEntry, Sampling
from control.requests import Claimed, Emission
from worker.leader.request import RunningRequest
from worker.leader.request_counters import RequestCounters
from worker.rank import series
from worker.rank.counters import Counters


def claimed(log: list[LogEntry], first_ms: int = 0) -> RunningRequest:
    params = GenerationRequest(prompt=[1] * 40, sampling=Sampling(max_tokens=9, seed="1"))
    claim = Claimed("r", "t", "normal", 1, 0, len(log), 1, claimed_ms=1_500, enqueued_ms=1_000, first_ms=first_ms)
    request = RunningRequest.begin(claim, params)
    request.replay(log)
    return request


def counted(counters: Counters, one: series.Series) -> tuple[float, float]:
    """Observations of a histogram, and their sum."""
    *counts, total = counters.read(one)
    return sum(counts), pytest.approx(total)


def emit(request_counters: RequestCounters, request: RunningRequest, now_ms: int, state: Any = "finished") -> None:
    emission = request.emission(state)
    request.emitted(emission)
    request_counters.accepted([(request, emission)], now_ms)


def test_a_whole_answer() -> None:
    """Its first token, the tokens after it, and its end."""
    counters = Counters()
    found, request = RequestCounters(counters), claimed([])
    request.live[0].cached_prompt_tokens = 32
    request.append(0, 5)
    emit(found, request, 2_000)
    emit(found, request, 2_100)  # nothing new
    for token in (6, 7):
        request.append(0, token)
    emit(found, request, 2_200)
    request.append(0, 8, "stop", "token")
    emit(found, request, 2_500)
    assert counted(counters, series.TO_FIRST_TOKEN) == (1, 1.0)
    assert counted(counters, series.BETWEEN_TOKENS) == (3, 0.5)
    assert counters.read(series.GENERATION_TOKENS) == [4]
    assert (counters.read(series.PROMPT_TOKENS), counters.read(series.PREFIX_HITS)) == ([40], [32])
    assert counters.read(series.SUCCESS) == [1, 0, 0, 0]
    seconds = {
        series.WHOLE: 1.5,
        series.QUEUED: 0.5,
        series.PREFILL: 0.5,
        series.DECODE: 0.5,
        series.INFERENCE: 1.0,
        series.PER_TOKEN: 0.5 / 3,
        series.REQUEST_PROMPT: 40,
        series.REQUEST_GENERATION: 4,
    }
    assert {one.name: counted(counters, one) for one in seconds} == {
        one.name: (1, value) for one, value in seconds.items()
    }


def test_a_request_that_survived_counts_once() -> None:
    """The first leader brings the first token and dies; the second brings the end, with the first token's true time."""
    first, second = Counters(), Counters()
    request = claimed([])
    request.append(0, 5)
    emit(RequestCounters(first), request, 2_000)
    request = claimed([LogEntry(1, 0, 5)], first_ms=2_000)
    request.append(0, 6)
    emit(RequestCounters(second), request, 9_000)
    request.append(0, 7, "length")
    emit(RequestCounters(second), request, 9_100)
    assert counted(first, series.TO_FIRST_TOKEN) == (1, 1.0) and counted(second, series.TO_FIRST_TOKEN)[0] == 0
    assert first.read(series.SUCCESS) == [0, 0, 0, 0] and second.read(series.SUCCESS) == [0, 1, 0, 0]
    assert first.read(series.GENERATION_TOKENS) == [1] and second.read(series.GENERATION_TOKENS) == [2]
    assert counted(second, series.BETWEEN_TOKENS) == (1, 0.1)
    assert counted(second, series.DECODE) == (1, 7.1) and counted(second, series.REQUEST_GENERATION) == (1, 3)


def test_rows_of_an_offer() -> None:
    """Rows with different gaps, numbers of tokens and no token at all, in one pass: each counts for itself."""
    counters = Counters()
    found, rows = RequestCounters(counters), [claimed([]) for _ in range(5)]
    for at, request in enumerate(rows):
        request.append(0, 5)
        emit(found, request, 2_000 + 100 * (at == 3))
    offered: list[tuple[RunningRequest, Emission]] = []
    for request, tokens in zip(rows, (1, 1, 2, 1, 0), strict=True):
        for token in range(tokens):
            request.append(0, token)
        emission = request.emission()
        request.emitted(emission)
        offered.append((request, emission))
    found.accepted(offered, 2_200)
    assert counted(counters, series.BETWEEN_TOKENS) == (5, 0.2 + 0.2 + 2 * 0.1 + 0.1)
    assert counters.read(series.BETWEEN_TOKENS)[4:6] == [3, 0] and counters.read(series.BETWEEN_TOKENS)[6] == 2
    assert counters.read(series.GENERATION_TOKENS) == [10]


@pytest.mark.parametrize(("finish", "at"), [("cancelled", 2), ("expired", 2), ("error", 3), ("tool_calls", 0)])
def test_each_way_to_end_has_its_reason(finish: FinishReason, at: int) -> None:
    """A request that ended before its first token has a queue time and no time per token."""
    counters = Counters()
    request = claimed([])
    request.end(finish, "why")
    emit(RequestCounters(counters), request, 3_000)
    assert counters.read(series.SUCCESS)[at] == 1 and sum(counters.read(series.SUCCESS)) == 1
    assert counted(counters, series.PER_TOKEN)[0] == 0
    assert counted(counters, series.TO_FIRST_TOKEN)[0] == (finish == "tool_calls")
    assert counted(counters, series.REQUEST_GENERATION) == (1, 0)
