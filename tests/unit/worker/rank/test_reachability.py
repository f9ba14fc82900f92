"""When a silent rank or host is blamed; and a step for its length."""

from __future__ import annotations

import time

from tests.unit.control.redis.test_outage import Clock
from worker.rank.heartbeat import Progress
from worker.rank.reachability import GAP_S, GRACE_S, Reachability


def test_silence_counts_only_where_redis_was_there_all_along() -> None:
    """Not during an absence, and not until everybody had time to be heard again."""
    clock = Clock()
    reachability = Reachability(clock)
    assert reachability.steady
    assert reachability.note() == 0.0
    clock.now += GAP_S / 2
    assert reachability.steady and reachability.note() == 0.0
    clock.now += 15.0
    assert not reachability.steady
    assert reachability.note() == 15.0
    for _ in range(4):
        assert not reachability.steady
        clock.now += GRACE_S / 4
        reachability.note()
    assert reachability.steady


def test_an_absence_of_redis_is_not_held_against_the_step_under_way() -> None:
    """Only the time in which Redis was there counts, and only for that step."""
    progress = Progress()
    progress.begin(0.05)
    time.sleep(0.06)
    assert progress.overdue
    progress.excuse(60.0)
    assert not progress.overdue and progress.pending_ms >= 60
    time.sleep(0.06)
    assert progress.overdue
    progress.end(1)
    progress.begin(0.0)
    assert progress.overdue


def test_an_absence_while_nothing_is_under_way_excuses_nothing() -> None:
    """The next step has its own time."""
    progress = Progress()
    progress.excuse(60.0)
    progress.begin(-1.0)
    assert progress.overdue
