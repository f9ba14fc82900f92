"""Epochs that get nowhere are followed by a pause."""

from __future__ import annotations

from worker.leader.leader import PAUSES_S, Backoff


def test_it_doubles_up_to_its_bound() -> None:
    """Epochs whose first step fails follow each other ever more slowly."""
    backoff = Backoff()
    pauses = [backoff.after(steps=0, failed=True) for _ in range(2000)]
    assert pauses[:3] == [PAUSES_S[0], 2 * PAUSES_S[0], 4 * PAUSES_S[0]]
    assert pauses[-1] == PAUSES_S[-1]


def test_progress_or_another_end_starts_it_over() -> None:
    """A completed step, or an end that no step caused, costs no pause."""
    backoff = Backoff()
    backoff.after(steps=0, failed=True)
    assert backoff.after(steps=1, failed=True) == 0.0
    assert backoff.after(steps=0, failed=False) == 0.0
    assert backoff.after(steps=0, failed=True) == PAUSES_S[0]
