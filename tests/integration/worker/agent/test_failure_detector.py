"""The agent detects ranks without progress: ranks that live, as seen through Redis."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from control.replicas.health import read_poison, write_status
from control.replicas.model_overviews import overview
from tests.integration.worker.agent.watched import WORLD, Watched
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.supervisor import supervised
from tests.waiting import until
from worker.agent import failure_detector as detector_module
from worker.agent.failure_detector import context_switches
from worker.agent.supervision.client import ChildProcess
from worker.agent.supervision.wire import AT_ONCE
from worker.rank import reachability as reachability_module


@pytest.fixture
def watched(redis: ReplicaRedis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setattr(reachability_module, "GAP_S", 60.0)  # a test that stands still is no absence of Redis
    with supervised() as supervisor:
        yield Watched(redis, supervisor)


def test_a_rank_that_falls_silent_is_poison_and_killed(watched: Watched) -> None:
    """It has beaten in this epoch, its process lives, and now it does not beat: it hangs."""
    watched.beats(0, 1)
    watched.look()
    watched.hush(1)
    watched.look()
    poison = read_poison(watched.redis.client, MODEL, REPLICA)
    assert poison is not None and (poison.kind, poison.rank) == ("silent", 1)
    assert watched.killed() == [1]


@pytest.fixture
def busy(watched: Watched) -> ChildProcess:
    """Rank 1's process, which now always wants a processor."""
    watched.replica.processes[1].kill()
    watched.replica.processes[1].wait()
    command = [sys.executable, "-S", "-c", "while True: pass"]
    process = watched.replica.supervisor.spawn(command, dict(os.environ), {}, AT_ONCE)
    until(lambda: all(detector_module.wants_to_run(process.pid) for _ in range(20)), 40.0)
    watched.replica.processes[1] = process
    return process


def test_a_rank_that_waits_for_a_processor_is_spared(
    watched: Watched, busy: ChildProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is too busy a heartbeat can be late; only one that stays silent is ended in the end."""
    watched.beats(0, 1)
    watched.look()
    watched.hush(1)
    watched.look()
    assert watched.killed() == [] and read_poison(watched.redis.client, MODEL, REPLICA) is None
    monkeypatch.setattr(detector_module, "STARVED_S", -1.0)
    watched.look()
    assert watched.killed() == [1]


def test_a_busy_rank_that_is_stopped_is_found(watched: Watched, busy: ChildProcess) -> None:
    """None of its threads wants to run any more."""
    watched.beats(0, 1)
    watched.look()
    busy.send_signal(signal.SIGSTOP)
    until(lambda: not detector_module.wants_to_run(busy.pid), 40.0)
    watched.look()
    watched.hush(1)
    watched.look()
    assert watched.killed() == [1]


def test_a_rank_that_runs_now_and_then_is_slow_and_not_stopped(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found stopped at every look, and has run between any two; once it runs no more it is killed."""
    monkeypatch.setattr(detector_module, "STOPPED_S", 0.3)
    pid = watched.replica.processes[1].pid

    def run_a_moment() -> None:
        before = context_switches(pid)
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: context_switches(pid) > before and psutil.Process(pid).status() == psutil.STATUS_STOPPED)

    watched.beats(0, 1)
    watched.look()
    watched.hush(1)
    enough = time.monotonic() + 2 * detector_module.STOPPED_S
    while time.monotonic() < enough:
        run_a_moment()
        watched.look()
    assert watched.killed() == [] and read_poison(watched.redis.client, MODEL, REPLICA) is None

    def found() -> bool:
        watched.look()
        return read_poison(watched.redis.client, MODEL, REPLICA) is not None

    until(found, 40.0)
    assert watched.killed() == [1]


def test_after_a_pause_of_redis_no_rank_is_suspected_at_once(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the agent could not look, the ranks may not have been able to beat: they get the life of a heartbeat."""
    watched.beats(0, 1)
    watched.look()
    watched.hush(1)
    monkeypatch.setattr(reachability_module, "GAP_S", -1.0)
    watched.look()
    assert watched.killed() == []
    monkeypatch.setattr(reachability_module, "GAP_S", 60.0)

    def poisoned() -> bool:
        watched.beats(0)
        watched.look()
        return read_poison(watched.redis.client, MODEL, REPLICA) is not None

    until(poisoned, 40.0)
    assert watched.killed() == [1]


def test_a_rank_that_was_never_heard_is_not_judged(watched: Watched) -> None:
    """Starting takes as long as it takes: there is no word yet that could be missing."""
    watched.beats(0)
    watched.look()
    watched.look()
    assert read_poison(watched.redis.client, MODEL, REPLICA) is None and watched.killed() == []


def test_a_redis_that_lost_everything_makes_no_suspect(watched: Watched) -> None:
    """Without the epoch's key the silence is Redis's, not the ranks'."""
    watched.beats(0, 1)
    watched.look()
    watched.redis.client.flushall()
    watched.look()
    assert watched.killed() == []


def test_a_word_of_an_older_epoch_is_not_missed_in_this_one(watched: Watched) -> None:
    """A rank that left with its epoch has not been heard in the new one, so it can't be silent there."""
    watched.beats(0, 1)
    watched.look()
    watched.redis.lapse()
    watched.lease = watched.redis.lead(WORLD)
    watched.hush(1)
    watched.look()
    assert watched.killed() == []


def test_a_stopped_rank_is_killed_in_any_epoch_or_none(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two epochs it has no heartbeat to be missed, and its leader would wait for it for minutes."""
    watched.replica.processes[1].send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(watched.replica.processes[1].pid).status() == psutil.STATUS_STOPPED)
    watched.look()
    assert watched.killed() == [], "somebody may let it go on at once"
    monkeypatch.setattr(detector_module, "STOPPED_S", 0.0)
    watched.look()
    assert watched.killed() == [1]


@pytest.mark.parametrize("rank", [0, 1])
def test_who_does_not_come_to_the_next_epoch_is_killed(
    watched: Watched, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in the one before and its process lives: it hangs where no deadline reaches it."""
    watched.beats(0, 1)
    watched.look()
    watched.redis.lapse()
    watched.lease = watched.redis.lead(WORLD)
    watched.hush(rank)
    if rank == 1:
        watched.beats(0, phase="forming")
    watched.look()
    assert watched.killed() == [], "it has time to come"
    monkeypatch.setattr(detector_module, "LATE_S", 0.0)
    watched.look()
    assert watched.killed() == [rank]


def test_a_pause_in_looking_starts_the_wait_again(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """While Redis is away nobody can be seen to come."""
    watched.beats(0, 1)
    watched.look()
    watched.redis.lapse()
    watched.lease = watched.redis.lead(WORLD)
    watched.hush(0)
    watched.look()
    monkeypatch.setattr(detector_module, "LATE_S", 0.0)
    monkeypatch.setattr(reachability_module, "GAP_S", -1.0)
    watched.look()
    assert watched.killed() == []


@pytest.mark.parametrize(
    ("kind", "rank", "ends"),
    [("deadline", 1, [1]), ("deadline", -1, []), ("forward_failed", 1, []), ("gap", 1, [])],
)
def test_only_who_let_a_deadline_pass_is_killed_at_once(
    watched: Watched, kind: str, rank: int, ends: list[int]
) -> None:
    """Ranks leave a poisoned epoch by themselves and keep their weights; one that hangs can't."""
    watched.beats(0, 1)
    watched.poison(kind, rank)
    watched.look()
    watched.look()
    assert watched.killed() == ends


def test_who_stays_in_a_poisoned_epoch_is_killed(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that still beats in it after the time to leave hangs, and its own deadman does too."""
    watched.beats(0, 1)
    watched.poison("forward_failed", 0)
    watched.look()
    watched.look()
    assert watched.killed() == [], "it has time to leave"
    monkeypatch.setattr(detector_module, "POISON_IGNORED_S", -1.0)
    watched.hush(0)
    watched.look()
    assert watched.killed() == [1]


def test_the_last_word_of_a_leader_that_has_ended_forgives_nothing(watched: Watched) -> None:
    """It outlives the process by more than a second; the cause of the end must stay in the status."""
    write_status(watched.redis.client, MODEL, REPLICA, "backoff", "its folder is away", host="host", tp=WORLD)
    watched.replica.pause()
    watched.beats(0)
    ended = watched.replica.processes.pop(0)
    try:
        watched.look()
        assert watched.replica.attempts == 1
        assert watched.redis.client.hget(watched.redis.keys.status, "state") == "backoff"
    finally:
        watched.replica.processes[0] = ended


def test_a_group_that_serves_is_forgiven(watched: Watched) -> None:
    """Once it is ready earlier failures count no more, and the operator sees `running` instead of `backoff`."""
    write_status(watched.redis.client, MODEL, REPLICA, "backoff", "rank 1 could not load", host="host", tp=WORLD)
    watched.replica.pause()
    watched.replica.pause()
    watched.beats(0, phase="loading")
    watched.look()
    assert watched.replica.attempts == 2, "loading is not serving"
    watched.beats(0)
    watched.look()
    assert watched.replica.attempts == 0
    assert watched.redis.client.hget(watched.redis.keys.status, "state") == "running"
    assert overview(watched.redis.client, MODEL).model == MODEL
