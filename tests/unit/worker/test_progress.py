"""What the side thread judges a step by."""

from __future__ import annotations

from worker.progress import PER_TOKEN_S, STEP_FLOOR_S, UNKNOWN_STEP_S, Deadlines, Progress


def test_without_history_a_step_may_be_slow() -> None:
    """The first steps warm everything up, so they get the generous deadline."""
    assert Deadlines().step(0) == UNKNOWN_STEP_S


def test_the_deadline_follows_the_p99_but_never_below_the_floor() -> None:
    """Fast steps keep the floor; slow ones raise the deadline to ten times their p99."""
    fast, slow = Deadlines(), Deadlines()
    for _ in range(100):
        fast.observe(0.004, 0)
        slow.observe(0.5, 0)
    assert fast.step(0) == STEP_FLOOR_S
    assert slow.step(0) == 5.0


def test_prompt_tokens_buy_time_and_teach_nothing() -> None:
    """A step with a prompt chunk gets more time, and does not raise the deadline of those without."""
    deadlines = Deadlines()
    for _ in range(100):
        deadlines.observe(0.004, 0)
        deadlines.observe(9.0, 512)
    assert deadlines.step(0) == STEP_FLOOR_S
    assert deadlines.step(512) == STEP_FLOOR_S + 512 * PER_TOKEN_S


def test_only_what_is_under_way_can_be_overdue() -> None:
    """A step that has begun is overdue past its deadline; one that ended, or an idle rank, never is."""
    progress = Progress()
    assert not progress.overdue and progress.pending_ms == 0
    progress.begin(-1.0)
    assert progress.overdue
    progress.end(7)
    assert not progress.overdue and progress.seq == 7
