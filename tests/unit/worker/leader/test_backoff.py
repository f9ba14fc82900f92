"""Epochs that get nowhere are followed by a pause."""

from __future__ import annotations

from worker.leader.leader import FIRST_PAUSE_S, LONGEST_PAUSE_S, Backoff


def test_it_doubles_up_to_its_bound() -> None:
    """Epochs whose first step fails follow each other ever more slowly."""
    backoff = Backoff()
    pauses = [backoff.after(steps=0, failed=True) for _ in range(10)]
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S


def test_progress_or_another_end_starts_it_over() -> None:
    """A completed step, or an end that no step caused, costs no pause."""
    backoff = Backoff()
    backoff.after(steps=0, failed=True)
    assert backoff.after(steps=1, failed=True) == 0.0
    assert backoff.after(steps=0, failed=False) == 0.0
    assert backoff.after(steps=0, failed=True) == FIRST_PAUSE_S
