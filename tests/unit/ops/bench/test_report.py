"""A scenario without data fails: the harness must fail where a figure has none."""

from __future__ import annotations

import pytest

from ops.bench.load.load import SCENARIOS, SEGMENTS, ScenarioAnswers, ScenarioReport, report, table
from ops.harness.client import Answer
from tests.unit.ops.bench.test_segments import STAMPS


def measured(count: int = 4, *, drop: str = "", of: int | None = None) -> ScenarioAnswers:
    """`count` successes by two users on two models; `drop` is missing from the stamps of the first `of`."""
    answers = [
        Answer(f"user-{i % 2}", f"m{i % 2}", f"r{i}", sent_ms=1000, first_ms=1032, end_ms=1135, tokens=8)
        for i in range(count)
    ]
    stamps = {answer.rid: dict(STAMPS) for answer in answers}
    for answer in answers[: count if of is None else of]:
        stamps[answer.rid].pop(drop, None)
    return ScenarioAnswers(SCENARIOS["1-streaming"], answers, stamps, seconds=2.0)


def test_a_complete_scenario_passes_with_its_figures() -> None:
    """Rates count successes and their tokens over the whole time."""
    report_text = report(measured())
    assert report_text.faults == []
    assert (report_text.total, report_text.success, report_text.requests_per_second, report_text.tokens_per_second) == (
        4,
        4,
        2,
        16,
    )
    assert report_text.segments.keys() == SEGMENTS.keys()
    assert report_text.segments["decode"].p99 == 100
    assert report_text.client["ttft"].mean == 32
    assert [(name, group.success) for name, group in report_text.users.items()] == [("user-0", 2), ("user-1", 2)]
    assert report_text.models["m1"].tokens_per_second == 8


@pytest.mark.parametrize("stamp", [stamp for stamp in STAMPS if stamp != "client_end"])
@pytest.mark.parametrize("missing_in", [1, 4])
def test_a_segment_without_data_fails_the_scenario(stamp: str, missing_in: int) -> None:
    """Missing for one request or for all: every segment that needs the stamp is named, with how many have it."""
    report_text = report(measured(drop=stamp, of=missing_in))
    for name, pair in SEGMENTS.items():
        fault_text = f"segment {name!r} has data for {4 - missing_in} of 4 requests"
        assert any(fault.startswith(fault_text) for fault in report_text.faults) == (stamp in pair)
    assert "FAILED" in table(report_text)


def test_a_request_that_failed_fails_the_scenario() -> None:
    """Errors are counted by kind, and the rest is still reported."""
    with_error = measured()
    with_error.answers.append(Answer("user-0", "m0", sent_ms=1000, end_ms=1001, error="429 queue_full"))
    report_text = report(with_error)
    assert report_text.errors == {"429 queue_full": 1}
    assert report_text.faults == ["1 requests failed: 429 queue_full"]
    assert (report_text.total, report_text.success) == (5, 4)


def test_no_success_is_a_failure_without_figures() -> None:
    """A farm that refuses everything has no segments at all."""
    refused = [Answer("user-0", "m0", sent_ms=1000, end_ms=1001, error="503 model_failed")]
    report_text = report(ScenarioAnswers(SCENARIOS["1-streaming"], refused, {}, 1.0))
    assert report_text.segments == {}
    assert "no request succeeded" in report_text.faults


def test_wrong_clocks_fail_the_scenario() -> None:
    """A stamp of another clock is a fault, not a figure."""
    skewed = measured()
    skewed.stamps["r0"]["t_received"] = 9e9
    assert any("clocks" in fault for fault in report(skewed).faults)


def test_the_table_has_every_segment_model_and_user() -> None:
    """Each line fits in 100 columns."""
    report_text: ScenarioReport = report(measured())
    text = table(report_text)
    for name in (*SEGMENTS, "client ttft", "client total", "m0", "m1", "user-0", "user-1"):
        assert f"\n  {name:<16}" in text
    assert max(map(len, text.splitlines())) <= 100
