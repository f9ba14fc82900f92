"""The waits of the last seconds, as a heartbeat tells them."""

from __future__ import annotations

import pytest

from worker.rank.heartbeat import RecentWaits


def test_only_the_last_five_seconds_count() -> None:
    """Nothing is told before so much was seen; what is older falls out; another group begins anew."""
    recent = RecentWaits()
    assert {recent.add(0.5 * turn, 0.4 * turn, 0.3 * turn) for turn in range(10)} == {(0, 0)}
    assert recent.add(5.0, 4.0, 3.0) == (4000, 3000)
    told = [recent.add(5.0 + 0.5 * turn, 4.0 + 0.1 * turn, 3.0) for turn in range(1, 11)]
    assert told[-1] == pytest.approx((1000, 0), abs=1)
    assert recent.add(10.5, 0.1, 0.1) == (0, 0)


def test_late_looks_and_a_wait_that_was_counted_early_do_no_harm() -> None:
    """After an outage of Redis the figures are those of five seconds; waits stay between 0 and all of the forwards."""
    recent = RecentWaits()
    recent.add(0.0, 0.0, 0.0)
    assert recent.add(20.0, 20.0, 30.0) == (5000, 5000)
    assert recent.add(25.0, 25.0, 29.0) == (5000, 0)
