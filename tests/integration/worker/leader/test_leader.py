"""Answers go on over epochs: with a tiny real model, exactly where they were, whatever ends one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from control import requests
from control.errors import GroupError
from control.keys import ModelKeys
from control.messages import Assignment, ModelSpec
from control.records import catalog
from control.redis import connection as connection_module
from control.redis.connection import Call
from control.replicas import health
from control.replicas.health import write_poison
from control.replicas.lease import Lease
from control.requests import Emission, EmitResult
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader_scene import KV_TOKENS, LeaderScene
from tests.waiting import until
from worker.leader import exchange as exchange_module
from worker.leader import request_loop as request_loop_module
from worker.leader import serving as serving_module
from worker.leader.group_leader import GroupLeader
from worker.rank import heartbeat as heartbeat_module
from worker.rank import rank_worker as rank_worker_module
from worker.rank.rank_worker import RankWorker
from worker.repository import validation
from worker.repository.assets import read_assets


def test_a_load_that_fails_ends_the_process_with_its_reason(redis: ReplicaRedis, folder: Path) -> None:
    """The weights go with the process; the lock is free, nothing is published, and the poison has the cause."""
    files = validation.inspect(folder)
    spec = ModelSpec(name=MODEL, source=str(folder), dtype="float7")
    clients = (redis.another(), redis.blocking(), redis.another())
    assignment = Assignment(spec=spec, replica=REPLICA, ranks=[0], devices=["cpu"])
    rank_worker = RankWorker(0, 1, "cpu")
    leader = GroupLeader(clients, assignment, "host/1", files, read_assets(files, None), rank_worker, "127.0.0.1")
    with pytest.raises(GroupError, match="float7"):
        leader.run()
    assert "float7" in redis.run(health.poison_history(MODEL, REPLICA))[0].message
    assert redis.client.get(redis.keys.lock) is None
    assert catalog.get_assets(redis.client, MODEL) is None


def test_a_start_puts_the_counts_of_the_queue_right(redis: ReplicaRedis, folder: Path) -> None:
    """Leaked places and tokens, and the turn of a tenant that has nothing, are gone; what it answers counts."""
    keys = ModelKeys(MODEL)
    leaked = {"queued": 7, "queued:low": 7, "sequences:low": 9, "queued_tokens": 70}
    redis.client.hset(keys.load, mapping={name: str(count) for name, count in leaked.items()})
    for key in (keys.waiting("low"), keys.served("low")):
        redis.client.zadd(key, {"ghost": 9})
    scene = LeaderScene(redis, folder)
    try:
        until(lambda: not redis.client.exists(keys.served("low")), 40.0)
        assert redis.client.hmget(keys.load, "queued", "queued:low", "queued_tokens") in (
            ["0", "0", "0"],
            ["0", None, "0"],
        )
        assert not redis.client.exists(keys.waiting("low"))
        scene.ask("a", max_tokens=3)
        assert len(scene.answer("a")) == 3
    finally:
        scene.stop()


def test_a_load_that_takes_long_keeps_the_lock(
    redis: ReplicaRedis, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side thread renews it all the while, and no step's deadline counts; what is asked meanwhile waits."""
    go_on, real = threading.Event(), rank_worker_module.load
    monkeypatch.setattr(rank_worker_module, "load", lambda *a, **k: go_on.wait(40.0) and real(*a, **k))
    monkeypatch.setattr(heartbeat_module, "UNKNOWN_STEP_S", 0.0)
    monkeypatch.setattr(heartbeat_module, "STEP_FLOOR_S", 0.0)
    scene = LeaderScene(redis, folder)
    try:
        epoch = until(scene.epoch, 40.0)
        scene.ask("waits", max_tokens=3)
        renewals, left = 0, 0
        while renewals < 3:
            left, before = redis.client.pttl(redis.keys.lock), left
            renewals += left > before > 0
            assert left > 0, "the lock has lapsed"
        assert scene.state("waits") == "queued"
        monkeypatch.undo()
        go_on.set()
        assert len(scene.answer("waits")) == 3 and scene.epoch() == epoch
    finally:
        scene.stop()


def poisoned(scene: LeaderScene) -> None:
    write_poison(scene.redis.client, MODEL, REPLICA, scene.epoch(), -1, "exited", "a test says so")


def lost(scene: LeaderScene) -> None:
    scene.redis.lapse()


@pytest.mark.parametrize("strike", [poisoned, lost])
def test_an_epoch_that_ends_costs_no_token_and_no_weight(
    scene: LeaderScene, strike: Callable[[LeaderScene], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same process takes the next epoch without loading again; the answer is the undisturbed one, each seq once."""
    loads: list[object] = []
    real = rank_worker_module.load
    monkeypatch.setattr(rank_worker_module, "load", lambda *a, **k: loads.append(a) or real(*a, **k))
    scene.ask("whole")
    expected = scene.answer("whole")
    before, already = scene.epoch(), len(loads)
    scene.ask("struck")
    scene.under_way("struck")
    strike(scene)
    assert scene.answer("struck") == expected
    assert scene.epoch() > before, "the fault had no effect"
    assert [entry.seq for entry in scene.log("struck")] == list(range(1, len(expected) + 1))
    assert scene.redis.client.hget(scene.keys.request("struck"), "attempts") == "2"
    assert len(loads) == already, "the weights were loaded again"


def test_a_second_leader_waits_and_then_continues(scene: LeaderScene) -> None:
    """A stop gives what runs back to the queue at once; another process finds it there and goes on."""
    scene.ask("whole")
    expected = scene.answer("whole")
    scene.ask("struck")
    scene.under_way("struck")
    scene.stop()
    assert scene.state("struck") == "queued" and scene.redis.client.get(scene.redis.keys.lock) is None
    assert 0 < len(scene.log("struck")) < len(expected)
    scene.start()
    assert scene.answer("struck") == expected


def test_a_leader_that_drains_finishes_what_it_runs_and_claims_nothing(scene: LeaderScene) -> None:
    """Also over the end of an epoch; then it stops by itself, and what waits is left to others."""
    scene.ask("whole")
    expected = scene.answer("whole")
    scene.ask("running")
    scene.under_way("running")
    before = scene.epoch()
    scene.leader.signals.draining = True
    poisoned(scene)
    until(lambda: scene.epoch() > before, 40.0)
    scene.ask("late")
    assert scene.answer("running") == expected
    until(lambda: not scene.thread.is_alive(), 40.0)
    assert scene.ended == [] and scene.state("late") == "queued" and scene.log("late") == []
    assert scene.redis.client.get(scene.redis.keys.lock) is None


def test_an_idle_leader_stops_at_once(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for a request until its look at the queue ends."""
    monkeypatch.setattr(connection_module, "LONGEST_BLOCK_MS", 5_000)
    monkeypatch.setattr(request_loop_module, "IDLE_BLOCK_MS", 5_000)
    scene.leader._blocking.connection_pool.connection_kwargs["socket_timeout"] = 10.0
    scene.ask("whole")
    scene.answer("whole")
    until(lambda: any(one["cmd"] == "xread" for one in scene.redis.client.client_list()), 40.0)
    began = time.monotonic()
    scene.stop()
    assert time.monotonic() - began < 2.5


@pytest.fixture
def each_step_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of short steps don't wait for each other."""
    monkeypatch.setattr(exchange_module, "GATHER_S", 0.0)


@pytest.mark.usefixtures("each_step_alone")
def test_a_cancelled_request_stops_within_a_step_and_frees_its_memory(scene: LeaderScene) -> None:
    """Its log ends without a token, and a request that needs all the memory is served."""
    scene.ask("leaves")
    scene.under_way("leaves")
    scene.redis.run(requests.cancel(MODEL, "leaves", "t"))
    asked_at = len(scene.log("leaves"))
    scene.answer("leaves")
    log = scene.log("leaves")
    assert scene.state("leaves") == "cancelled"
    assert (log[-1].token, log[-1].finish) == (None, "cancelled")
    assert len(log) - asked_at <= 3, "a step may have been under way, and its emission"
    scene.ask("next", prompt=[7] * (KV_TOKENS - 20), max_tokens=20, min_tokens=20)
    assert len(scene.answer("next")) == 20


def test_a_deadline_that_passes_ends_a_running_request(scene: LeaderScene) -> None:
    """It gets an end that says so, between two steps, and nobody else notices."""
    scene.ask("short")
    scene.under_way("short", tokens=5)
    scene.redis.client.hset(scene.keys.request("short"), "deadline", 1)
    scene.answer("short")
    assert scene.state("short") == "expired" and scene.log("short")[-1].finish == "expired"
    scene.ask("next", max_tokens=3)
    assert len(scene.answer("next")) == 3


def test_what_can_never_fit_fails_alone(scene: LeaderScene) -> None:
    """It is told why; it does not block the queue behind it, and poisons nothing."""
    before = until(scene.epoch, 40.0)
    scene.ask("huge", prompt=[1] * (KV_TOKENS + 1), max_tokens=1)
    scene.ask("next", max_tokens=3)
    assert scene.answer("huge") == [None]
    [entry] = scene.log("huge")
    assert entry.finish == "error" and str(KV_TOKENS) in (entry.cause or "")
    assert len(scene.answer("next")) == 3
    assert scene.epoch() == before and health.read_poison(scene.redis.client, MODEL, REPLICA) is None


def test_the_phases_of_a_request_are_stamped(scene: LeaderScene) -> None:
    """From the enqueue to the last token each moment is in its hash, in order."""
    scene.ask("r", max_tokens=3)
    scene.answer("r")
    fields = scene.redis.client.hgetall(scene.keys.request("r"))
    moments = [int(fields[name]) for name in ("t_enqueued", "t_claimed", "t_prefill", "t_first", "t_last")]
    assert moments == sorted(moments)


def test_an_idle_leader_pings_and_stays(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle leader still checks that its group is alive, and makes the vocabulary for grammars, for which no step
    then waits."""
    scene.ask("before", max_tokens=1)
    scene.answer("before")
    assert scene.leader._grammars._tokenizer is None
    monkeypatch.setattr(request_loop_module, "IDLE_PING_S", 0.0)
    scene.ask("r", max_tokens=1)
    scene.answer("r")
    until(lambda: scene.leader._grammars._tokenizer is not None, 40.0)
    first = health.heartbeats(scene.redis.client, MODEL, REPLICA, 1)[0]

    def later() -> bool:
        beat = health.heartbeats(scene.redis.client, MODEL, REPLICA, 1)[0]
        return first is None or (beat is not None and beat.seq > first.seq and beat.oldest_pending_ms == 0)

    until(later, 40.0)


@pytest.mark.parametrize(("gather_s", "exchanges"), [(3600.0, [1, 19]), (0.0, [1] * 20)])
def test_the_tokens_of_short_steps_reach_redis_together(
    redis: ReplicaRedis, folder: Path, monkeypatch: pytest.MonkeyPatch, gather_s: float, exchanges: list[int]
) -> None:
    """The first token goes out at once, and so does the end with all that is owed; in between they may wait."""
    sizes: list[int] = []
    real = requests.emit_all

    def emit_all(lease: Lease, rows: list[Emission]) -> list[Call[EmitResult]]:
        sizes.extend(len(row.entries) for row in rows)
        return real(lease, rows)

    monkeypatch.setattr(requests, "emit_all", emit_all)
    monkeypatch.setattr(exchange_module, "GATHER_S", gather_s)
    monkeypatch.setattr(serving_module, "OVERLAP_BELOW_S", 3600.0)
    scene = LeaderScene(redis, folder)
    try:
        scene.ask("r", max_tokens=20)
        assert len(scene.answer("r")) == 20
        assert [size for size in sizes if size] == exchanges
    finally:
        scene.stop()
