"""Pauses between tries double up to a longest, which is repeated."""

from __future__ import annotations

from control.backoff import doubling, pause_after


def test_the_last_pause_is_the_longest() -> None:
    """Each is twice the one before, and the last is cut to the longest."""
    assert doubling(0.5, 3.0) == (0.5, 1.0, 2.0, 3.0)
    assert doubling(0.5, 8.0) == (0.5, 1.0, 2.0, 4.0, 8.0)


def test_failures_beyond_the_table_repeat_its_last_pause() -> None:
    """The first failure is followed by the first pause."""
    assert [pause_after(failures, (0.0, 1.0, 2.0)) for failures in (1, 2, 3, 4, 5000)] == [0.0, 1.0, 2.0, 2.0, 2.0]
