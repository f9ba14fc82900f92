"""A rank's side thread renews, reads poison and ends stuck processes."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import structlog

from control.errors import EpochOver, Fenced, Lost, Poisoned
from control.redis.connection import connect
from control.redis.outage import Outage
from control.replicas.health import Beat, beat, heartbeats, read_poison, write_poison
from control.replicas.lease import Lease
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.servers import serving
from tests.waiting import until
from worker.rank import heartbeat as heartbeat_module
from worker.rank.exit_codes import STUCK
from worker.rank.heartbeat import Heartbeat, Progress

WORLD = 2


def heartbeat_of(redis: ReplicaRedis, lease: Lease, rank: int = 0, progress: Progress | None = None) -> Heartbeat:
    own = lease if rank == 0 else None
    client = redis.another()
    return Heartbeat(client, MODEL, REPLICA, lease.epoch, rank, WORLD, "cpu", progress or Progress(), own)


def over_of(heartbeat: Heartbeat) -> EpochOver | None:
    """The error of `check`, or None."""
    try:
        heartbeat.check()
    except EpochOver as over:
        return over
    return None


def how_it_ended(heartbeat: Heartbeat) -> EpochOver:
    """The error of `check`, once it raises."""
    return until(lambda: over_of(heartbeat), 40.0)


def beat_of(redis: ReplicaRedis, lease: Lease, rank: int) -> None:
    """Let another rank be heard."""
    word = Beat(
        epoch=lease.epoch, seq=3, oldest_pending_ms=0, device="cpu", memory_bytes=0, phase="ready", pid=2, host="h"
    )
    redis.run(beat(MODEL, REPLICA, rank, word))


def test_it_renews_the_lock_and_tells_progress(redis: ReplicaRedis) -> None:
    """While the main thread works the lock does not lapse, and Redis shows how far it is."""
    lease, progress = redis.lead(WORLD), Progress()
    progress.phase = "ready"
    progress.begin(60.0)
    progress.end(7)
    redis.client.pexpire(redis.keys.lock, 900)
    with heartbeat_of(redis, lease, progress=progress) as heartbeat:
        until(lambda: redis.client.pttl(redis.keys.lock) > 900, 40.0)
        told = until(lambda: heartbeats(redis.client, MODEL, REPLICA, WORLD)[0], 40.0)
        heartbeat.check()
    assert (told.epoch, told.seq, told.phase, told.pid) == (lease.epoch, 7, "ready", os.getpid())


def test_it_hears_of_poison(redis: ReplicaRedis) -> None:
    """The main thread learns the kind, the words and the rank with its next check."""
    lease = redis.lead(WORLD)
    with heartbeat_of(redis, lease, rank=1) as heartbeat:
        write_poison(redis.client, MODEL, REPLICA, lease.epoch, 0, "exited", "the leader was killed")
        over = how_it_ended(heartbeat)
    assert isinstance(over, Poisoned) and (over.kind, over.rank) == ("exited", 0)


def test_the_end_gets_the_main_thread_out_of_its_waits(redis: ReplicaRedis) -> None:
    """It is said when `check` knows the reason already, so that whoever is let go can ask for it."""
    lease, known = redis.lead(WORLD), list[EpochOver | str]()

    def let_go(reason: str) -> None:
        try:
            heartbeat.check()
        except EpochOver as over:
            known.extend([over, reason])

    heartbeat = Heartbeat(redis.another(), MODEL, REPLICA, lease.epoch, 1, WORLD, "cpu", Progress(), at_end=let_go)
    with heartbeat:
        write_poison(redis.client, MODEL, REPLICA, lease.epoch, 0, "exited", "the leader was killed")
        over, reason = until(lambda: known, 40.0)
    assert isinstance(over, Poisoned) and reason == str(over)


def test_a_leader_tells_lost_from_fenced(redis: ReplicaRedis) -> None:
    """A lock that only lapsed may be taken again; one that another holds is gone for good."""
    lease = redis.lead(WORLD)
    redis.lapse()
    with heartbeat_of(redis, lease) as heartbeat:
        assert isinstance(how_it_ended(heartbeat), Lost)
    redis.lead(WORLD, owner="other/2")
    with heartbeat_of(redis, lease) as heartbeat:
        assert isinstance(how_it_ended(heartbeat), Fenced)


def test_a_leader_takes_a_lock_that_ran_out_again(redis: ReplicaRedis) -> None:
    """Where only its life was over, the epoch goes on for all."""
    lease = redis.lead(WORLD)
    redis.client.delete(redis.keys.lock)
    with heartbeat_of(redis, lease) as heartbeat, heartbeat_of(redis, lease, rank=1) as other:
        until(lambda: redis.client.get(redis.keys.lock) == lease.token, 40.0)
        heartbeat.check()
        other.check()


def test_others_are_freed_from_an_epoch_whose_lock_is_lost(redis: ReplicaRedis) -> None:
    """A leader that does not leave may wait for ranks whose command was lost with the lock: their epoch ends."""
    lease = redis.lead(WORLD)
    with heartbeat_of(redis, lease), heartbeat_of(redis, lease, rank=1) as other:
        redis.client.flushall()
        assert isinstance(how_it_ended(other), Fenced)


def test_a_rank_hears_of_the_next_epoch(redis: ReplicaRedis) -> None:
    """Ranks hold no lock; that the epoch moved on is enough for them to leave."""
    lease = redis.lead(WORLD)
    redis.lapse()
    redis.lead(WORLD)
    with heartbeat_of(redis, lease, rank=1) as heartbeat:
        assert isinstance(how_it_ended(heartbeat), Fenced)


@pytest.mark.parametrize("heard", [False, True])
def test_an_overdue_step_is_poison_naming_the_rank_that_is_silent(redis: ReplicaRedis, heard: bool) -> None:
    """A hang is noticed though every process lives; if all ranks beat, no rank is named."""
    lease, progress = redis.lead(WORLD), Progress()
    if heard:
        beat_of(redis, lease, 1)
    progress.begin(-1.0)
    with heartbeat_of(redis, lease, progress=progress) as heartbeat:
        over = how_it_ended(heartbeat)
    poison = read_poison(redis.client, MODEL, REPLICA)
    assert isinstance(over, Poisoned) and poison is not None
    assert (poison.kind, poison.rank, poison.epoch) == ("deadline", -1 if heard else 1, lease.epoch)
    assert ("every rank still beats" if heard else "rank 1 has no heartbeat") in poison.message


def test_a_leader_that_waits_for_a_slow_rank_is_not_overdue(redis: ReplicaRedis) -> None:
    """It stands still in a collective while the other rank computes; where that one stands still too, it is overdue."""
    lease, progress, renewed = redis.lead(WORLD), Progress(), list[float]()
    redis.client.persist(redis.keys.lock)

    def other_at(count: int) -> None:
        word = Beat(
            epoch=lease.epoch, seq=3, oldest_pending_ms=9, device="cpu", memory_bytes=0, phase="ready", pid=2,
            host="h", progress=count,
        )  # fmt: skip
        redis.run(beat(MODEL, REPLICA, 1, word))

    progress.begin(1.5, lambda: renewed.append(time.monotonic()))
    with heartbeat_of(redis, lease, progress=progress) as heartbeat:
        began = time.monotonic()
        while time.monotonic() - began < 4.0:
            other_at(int(10 * time.monotonic()))
            heartbeat.check()
            time.sleep(0.1)

        def poisoned() -> Poisoned | None:
            other_at(1)
            over = over_of(heartbeat)
            return over if isinstance(over, Poisoned) else None

        redis_over = until(poisoned, 20.0)
    assert redis_over.kind == "deadline" and len(renewed) >= 2
    assert "every rank still beats" in redis_over.message


def test_an_overdue_leader_lets_its_lock_lapse(redis: ReplicaRedis) -> None:
    """A stuck leader loses the lock, so that another can lead; it still beats, with the age of the step."""
    lease, progress = redis.lead(WORLD), Progress()
    progress.begin(-1.0)
    redis.client.pexpire(redis.keys.lock, 1500)
    left: list[int] = []

    def lapses() -> bool:
        left.append(redis.client.pttl(redis.keys.lock))
        return left[-1] < 800

    with heartbeat_of(redis, lease, progress=progress):
        until(lapses, 40.0)
        told = heartbeats(redis.client, MODEL, REPLICA, WORLD)[0]
    assert max(left) <= 1500, "it was renewed"
    assert told is not None and told.oldest_pending_ms > 0


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Statuses with which the deadman would have ended this process; the grace is short."""
    statuses: list[int] = []
    monkeypatch.setattr(heartbeat_module, "OVER_STILL_S", 0.3)
    monkeypatch.setattr(heartbeat_module, "OVER_S", 1.5)
    monkeypatch.setattr(os, "_exit", statuses.append)
    return statuses


def test_a_main_thread_that_does_not_leave_is_ended(redis: ReplicaRedis, ends: list[int]) -> None:
    """It may hang where no exception reaches it; the process ends then, with a status of its own."""
    lease = redis.lead(WORLD)
    with heartbeat_of(redis, lease, rank=1):
        write_poison(redis.client, MODEL, REPLICA, lease.epoch, 0, "exited", "the leader was killed")
        until(lambda: ends, 40.0)
    assert set(ends) == {STUCK}


class Moving:
    """The gauges of a rank that makes progress all the time."""

    weights_read = (0, 0)
    waits = (0.0, 0.0)

    @property
    def progress(self) -> int:
        return time.monotonic_ns()


def test_a_main_thread_that_still_gets_on_has_more_time(redis: ReplicaRedis, ends: list[int]) -> None:
    """On a slow machine the way out of a layer takes longer than a hang is given; it is not endless either."""
    lease = redis.lead(WORLD)
    progress = Progress(Moving())
    began = time.monotonic()
    with heartbeat_of(redis, lease, rank=1, progress=progress):
        write_poison(redis.client, MODEL, REPLICA, lease.epoch, 0, "exited", "the leader was killed")
        until(lambda: ends, 40.0)
    assert set(ends) == {STUCK} and time.monotonic() - began > 1.5


def test_a_main_thread_that_leaves_in_time_lives(redis: ReplicaRedis, ends: list[int]) -> None:
    """The control: after its block was left the deadman is gone with it."""
    lease = redis.lead(WORLD)
    with heartbeat_of(redis, lease, rank=1) as heartbeat:
        write_poison(redis.client, MODEL, REPLICA, lease.epoch, 0, "exited", "the leader was killed")
        how_it_ended(heartbeat)
    assert not heartbeat._thread.is_alive() and ends == []


def test_redis_away_ends_nothing(redis: ReplicaRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epoch is kept while Redis can't be reached, and goes on when it is back with its data."""
    voice = Outage()
    monkeypatch.setattr(heartbeat_module, "outage", voice)
    with serving() as server, connect(server.url) as client:
        own = ReplicaRedis(server.url, client, redis.stack)
        lease = own.lead(WORLD)
        client.persist(own.keys.lock)
        with heartbeat_of(own, lease) as heartbeat:
            until(lambda: heartbeats(client, MODEL, REPLICA, WORLD)[0], 40.0)
            client.config_set("appendonly", "yes")
            until(lambda: client.info()["aof_rewrite_in_progress"] == 0, 40.0)
            server.kill()
            until(lambda: voice.seconds, 40.0)
            heartbeat.check()
            server.options = ("appendonly yes", "appendfsync always")
            server.start()
            until(lambda: heartbeats(client, MODEL, REPLICA, WORLD)[0], 40.0)
            heartbeat.check()


def test_its_lines_carry_the_context_of_the_main_thread(redis: ReplicaRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """Model, rank and epoch are on what the side thread logs too."""
    contexts: list[dict[str, Any]] = []

    class Recorder:
        def error(self, event: str, **_: Any) -> None:
            contexts.append(structlog.contextvars.get_contextvars() | {"event": event})

    monkeypatch.setattr(heartbeat_module, "log", Recorder())
    lease, progress = redis.lead(WORLD), Progress()
    progress.begin(-1.0)
    with (
        structlog.contextvars.bound_contextvars(model=MODEL, rank=0, epoch=lease.epoch),
        heartbeat_of(redis, lease, progress=progress),
    ):
        until(lambda: contexts, 40.0)
    assert contexts[0] == {"model": MODEL, "rank": 0, "epoch": lease.epoch, "event": "a step is overdue"}
