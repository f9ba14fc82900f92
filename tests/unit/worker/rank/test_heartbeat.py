"""A heartbeat reports progress, deadlines and waits: of the main thread, in the last seconds."""

from __future__ import annotations

import mmap
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.waiting import until
from worker.detectors import PER_TOKEN_S, STEP_FLOOR_S, UNKNOWN_STEP_S
from worker.rank.heartbeat import Deadlines, NoGauges, Progress, RecentWaits
from worker.rank.rank_worker import FAULTS_OF_PROGRESS, faults_of_other_threads


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


def test_progress_gives_a_command_all_of_its_time_again() -> None:
    """A command that gets on is never overdue, however long it takes; one that stands still is, as before."""
    gauges = NoGauges()
    progress = Progress(gauges)
    renewed: list[float] = []
    progress.begin(0.2, lambda: renewed.append(time.monotonic()))
    began = time.monotonic()
    while time.monotonic() - began < 0.6:
        gauges.progress += 1
        progress.look()
        assert not progress.overdue
        time.sleep(0.01)
    assert len(renewed) > 2 and progress.pending_ms >= 600
    until(lambda: progress.look() or progress.overdue, 40.0)
    assert progress.stalled_s > 0.2 and renewed[-1] < time.monotonic() - 0.2


def test_progress_before_a_command_is_none_of_its_own() -> None:
    """Only what happens after its beginning moves its deadline."""
    progress = Progress(NoGauges(progress=5))
    progress.look()
    progress.begin(-1.0)
    progress.look()
    assert progress.overdue


def test_pages_that_other_threads_read_are_progress() -> None:
    """A load reads mapped files: no call could be counted, but its page faults can."""
    size = 32 << 20
    before = faults_of_other_threads()
    for _ in range(3):
        sum(bytearray(size)[:: mmap.PAGESIZE])  # this thread's own faults are not counted
    assert faults_of_other_threads() - before < FAULTS_OF_PROGRESS
    with tempfile.TemporaryFile() as file, ThreadPoolExecutor(1) as reader:
        file.write(bytes(size))
        file.flush()
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
            reader.submit(lambda: sum(mapped[at] for at in range(0, size, mmap.PAGESIZE))).result()
    assert faults_of_other_threads() - before > 2 * FAULTS_OF_PROGRESS


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
