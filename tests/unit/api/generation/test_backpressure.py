"""Refusals for a full queue stand for a time."""

from __future__ import annotations

import pytest

from api.generation.session import FRESH_S, Backpressure
from control.errors import QueueFull


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def backpressure(now: list[float]) -> Backpressure:
    return Backpressure(lambda: now[0])


def test_a_refusal_stands_for_a_moment(backpressure: Backpressure, now: list[float]) -> None:
    """It says the same again, and asks nobody; then the queue is asked again."""
    backpressure.note("m", "t", "normal", QueueFull("m", 7, 3.0, "wait"))
    now[0] += FRESH_S / 2
    with pytest.raises(QueueFull, match="the wait would be too long") as again:
        backpressure.check("m", "t", "normal")
    assert (again.value.queued, again.value.retry_after) == (7, 3.0)
    now[0] += FRESH_S
    backpressure.check("m", "t", "normal")


@pytest.mark.parametrize("whose", [("other", "t", "normal"), ("m", "other", "normal"), ("m", "t", "high")])
def test_it_is_nobody_elses(backpressure: Backpressure, whose: tuple[str, str, str]) -> None:
    """Another model, tenant or class may have room."""
    backpressure.note("m", "t", "normal", QueueFull("m", 7, 3.0, "requests"))
    backpressure.check(*whose)


def test_a_request_that_was_too_long_says_nothing_of_others(backpressure: Backpressure) -> None:
    """A shorter one may fit."""
    backpressure.note("m", "t", "normal", QueueFull("m", 7, 3.0, "tokens"))
    backpressure.check("m", "t", "normal")


def test_what_is_remembered_is_bounded(backpressure: Backpressure, now: list[float]) -> None:
    """Old refusals are let go once there are many."""
    for index in range(20_000):
        now[0] += FRESH_S / 1000
        backpressure.note("m", f"t{index}", "normal", QueueFull("m", 7, 3.0))
    assert len(backpressure._refused) <= 4096  # pyright: ignore[reportPrivateUsage]
