"""Every row of a comparison gets the same work: in every round, and what goes wrong is told."""

from __future__ import annotations

from typing import Any

import pytest

from ops.bench.peers.engine import Failed, Row
from ops.bench.peers.results import EngineResults
from ops.bench.peers.runner import Plan, Runner
from ops.harness import processes
from tests.unit.ops.bench.peers.fakes import FakeEngine, made

A, B = Row("a", "f32"), Row("b", "f32")


@pytest.fixture(autouse=True)
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "memory_of_children", lambda _title: 100.0)


def plan(**changes: Any) -> Plan:
    usual: dict[str, Any] = {"rows": (A, B), "streams": (1, 2), "prompt": 30, "tokens": 4, "ttft": (30,), "rounds": 2}
    return Plan(**usual | {"vocabulary": 4096} | changes)


def run(plan: Plan, **engines: FakeEngine) -> EngineResults:
    return Runner(plan, made(**engines), lambda line: None).run()


def test_rounds_are_taken_in_turns() -> None:
    """Each engine is started and stopped in each round, before the next one starts."""
    events: list[str] = []
    run(plan(streams=(1,), ttft=()), a=FakeEngine(events=events), b=FakeEngine(events=events))
    assert events == 4 * ["start", "run 1", "run 1", "run 1", "run 1", "stop"]


def test_all_get_the_same_prompts_and_none_twice() -> None:
    """Both engines get the same requests; none can be answered from a cache."""
    a, b = FakeEngine(), FakeEngine()
    run(plan(), a=a, b=b)
    assert a.asked == b.asked
    prompts = [tuple(prompt) for asked, _ in a.asked for prompt in asked]
    assert len(set(prompts)) == len(prompts)
    assert {len(prompt) for prompt in prompts} == {16, 30}


def test_the_figures_of_a_row() -> None:
    """Medians over the rounds, the start, first tokens, and the ratio within a round."""
    results = run(plan(), a=FakeEngine(seconds=0.25), b=FakeEngine(seconds=0.5))
    first, second = results.rows[A], results.rows[B]
    median = first.median(2)
    assert median is not None
    assert (median.decode, median.ttft) == (pytest.approx(8), pytest.approx(250))
    assert len(first.runs[2]) == 2
    assert first.first_token_s == [2.25, 2.25]
    assert first.ttft_ms == {30: [250, 250]}
    assert first.equal == [1, 1, 1, 1]
    assert first.memory_mib == [100, 100]
    assert results.ratio(first, second, 1, lambda figures: figures.decode) == pytest.approx(2)
    assert results.faults == []


def test_an_engine_that_is_absent_is_skipped() -> None:
    """The others are measured, and nothing failed."""
    results = run(plan(), b=FakeEngine())
    assert results.rows[A].skipped == "no a here"
    assert results.rows[B].runs
    assert results.faults == []


@pytest.mark.parametrize("bad", [FakeEngine(fewer=1), FakeEngine(refusal=Failed("it broke"))], ids=["short", "broken"])
def test_what_breaks_fails_the_run(bad: FakeEngine) -> None:
    """A short stream and a broken engine are faults of their row; the engine is stopped and not started again."""
    results = run(plan(), a=bad, b=FakeEngine())
    assert [fault[:5] for fault in results.faults] == ["a:f32"]
    assert (bad.events.count("start"), bad.events.count("stop")) == (1, 1)
    assert results.rows[B].runs


def test_nothing_measured_is_a_fault() -> None:
    """All rows skipped is no success."""
    assert run(plan()).faults == ["nothing was measured"]


def test_a_long_prompt_has_a_start_of_its_own() -> None:
    """Many streams need not each have room for it."""
    sizes = list(plan(streams=(1, 8), ttft=(30, 4096)).sizes)
    assert [(streams, lengths) for streams, lengths, _ in sizes] == [((1, 8), (30,)), ((), (4096,))]
    assert sizes[0][2]["kv_tokens"] < 8 * 100
    assert (sizes[1][2]["streams"], sizes[1][2]["context"]) == (1, 4098)


def test_a_rate_needs_two_tokens() -> None:
    """One token is refused before anything runs."""
    with pytest.raises(ValueError, match="at least 2"):
        plan(tokens=1)
