"""A replica finishes a dead one's requests: two share a queue, and not before the other is gone for good."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from control import requests
from control.keys import ModelKeys, ReplicaKeys
from control.messages import Assignment, GenerationRequest, ModelSpec, Sampling, encode
from control.process import child_environment
from control.records import catalog
from control.redis.connection import run
from control.replicas import health
from control.replicas.health import heartbeats
from control.replicas.lease import acquire
from control.requests import Enqueue
from control.requests.token_log import read_log
from tests.farm import clean_environment
from tests.integration.worker.conftest import MODEL, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from tests.waiting import until
from worker.detectors import REPLICA_GONE_S
from worker.leader import exchange as exchange_module
from worker.leader.exchange import LOOK_EVERY_S, DeadReplicas

LONG = 300


class Clock:
    """The time of `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(exchange_module.time, "monotonic", clock)
    return clock


class Two:
    """The second of two replicas, looking at the first."""

    def __init__(self, redis: ReplicaRedis, clock: Clock) -> None:
        self.redis, self.clock = redis, clock
        lease = run(redis.client, acquire(MODEL, "r1", "host/2", 1))
        assert lease is not None
        for name in ("r0", "r1"):
            redis.run(catalog.put_replica(MODEL, name, catalog.Assigned(revision=1, tp=1)))
        self.dead_replicas = DeadReplicas(redis.client, lease)
        self.dead_replicas.gone()  # it learns who there is

    def watch(self, seconds: float) -> list[str]:
        """Look on for so long; who was found gone."""
        found = []
        for _ in range(round(seconds / LOOK_EVERY_S)):
            self.clock.now += LOOK_EVERY_S
            found += self.dead_replicas.gone()
        return found


@pytest.fixture
def two(redis: ReplicaRedis, clock: Clock) -> Two:
    return Two(redis, clock)


def test_a_replica_that_leads_or_comes_back_in_time_is_not_gone(two: Two) -> None:
    """An ordinary recovery keeps its requests; the time of its next absence counts from nothing."""
    two.redis.lead(1)
    two.redis.client.persist(two.redis.keys.lock)
    assert two.watch(2 * REPLICA_GONE_S) == []
    two.redis.lapse()
    assert two.watch(REPLICA_GONE_S) == []
    two.redis.lead(1)
    two.redis.client.persist(two.redis.keys.lock)
    assert two.watch(1) == []
    two.redis.lapse()
    assert two.watch(REPLICA_GONE_S) == []


def test_one_that_stays_away_is_gone_once(two: Two) -> None:
    """Taken over in one go; what comes after its return is another matter."""
    assert two.watch(3 * REPLICA_GONE_S) == ["r0"]
    two.redis.lead(1)
    assert two.watch(1) == []
    two.redis.lapse()
    assert two.watch(3 * REPLICA_GONE_S) == ["r0"]


def test_one_that_was_given_up_is_gone_at_once(two: Two) -> None:
    """Nothing will bring it back; one that was told before is told again, because its suspects may be taken now."""
    health.write_status(two.redis.client, MODEL, "r0", "failed", "its folder is gone")
    assert two.watch(3) == ["r0"]
    two.dead_replicas.look_again("r0")
    assert two.watch(3) == ["r0"]
    health.write_status(two.redis.client, MODEL, "r0", "running", "")
    two.redis.lead(1)
    assert two.watch(1) == []
    two.redis.lapse()
    assert two.watch(2 * REPLICA_GONE_S) == ["r0"]
    health.write_status(two.redis.client, MODEL, "r0", "failed", "its folder is gone")
    assert two.watch(3) == ["r0"]


def test_the_next_replica_of_a_name_is_gone_as_well(two: Two) -> None:
    """One that was given up is retired, and its name is given again. That one may be given up before it is seen to
    lead: its requests would wait for ever."""
    health.write_status(two.redis.client, MODEL, "r0", "failed", "its folder is gone")
    assert two.watch(3) == ["r0"]
    assert catalog.retire(two.redis.client, MODEL, "r0") == 0
    assert two.watch(2) == []
    two.redis.run(catalog.put_replica(MODEL, "r0", catalog.Assigned(revision=1, tp=1)))
    health.write_status(two.redis.client, MODEL, "r0", "failed", "its folder is gone")
    assert two.watch(3) == ["r0"]


def test_a_time_in_which_nobody_looked_counts_for_nothing(two: Two) -> None:
    """When Redis was away every lock lapsed: each leader gets its time to come back."""
    assert two.watch(REPLICA_GONE_S) == []
    two.clock.now += 60.0
    assert two.watch(REPLICA_GONE_S) == []
    assert two.watch(1) == ["r0"]


def test_it_costs_nothing_between_two_looks(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader calls it in every step."""
    asked: list[object] = []
    real = exchange_module.run_every
    monkeypatch.setattr(exchange_module, "run_every", lambda *a: asked.append(a) or real(*a))
    for _ in range(20):
        two.clock.now += LOOK_EVERY_S / 10
        two.dead_replicas.gone()
    assert len(asked) == 2


@contextmanager
def replica_process(redis: ReplicaRedis, spec: ModelSpec) -> Iterator[subprocess.Popen[bytes]]:
    """The leader of r0, which is its own only rank, as a process."""
    assignment = Assignment(spec=spec, replica="r0", ranks=[0], devices=["cpu"])
    environment = clean_environment() | child_environment(
        FURROW_ASSIGNMENT=encode(assignment).decode(),
        FURROW_RANK="0",
        FURROW_DEVICE="cpu",
        FURROW_FOLDER=spec.source,
        FURROW_HOST_ID="host-r0",
        FURROW_REDIS_URL=redis.url,
    )
    process = subprocess.Popen([sys.executable, "-m", "worker", "rank"], env=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Shared:
    """Requests to a model, whoever serves it."""

    def __init__(self, redis: ReplicaRedis) -> None:
        self.redis, self.keys = redis, ModelKeys(MODEL)

    def ask(self, rid: str) -> None:
        sampling = Sampling(max_tokens=LONG, min_tokens=LONG, temperature=0.8, seed="7")
        params = GenerationRequest(prompt=[10, 20, 30, 40], sampling=sampling)
        self.redis.run(requests.enqueue(Enqueue(rid=rid, model=MODEL, params=params, tenant="t")))

    def tokens(self, rid: str) -> list[int | None]:
        entries = self.redis.run(read_log(MODEL, rid, 0))
        assert [entry.seq for entry in entries] == list(range(1, len(entries) + 1))
        return [entry.token for entry in entries]

    def field(self, rid: str, name: str) -> str | None:
        return self.redis.client.hget(self.keys.request(rid), name)

    def ready(self, replica: str) -> bool:
        beat = heartbeats(self.redis.client, MODEL, replica, 1)[0]
        return beat is not None and beat.phase == "ready"


@pytest.mark.timeout(180)
def test_what_a_lost_replica_left_is_finished_by_the_other(
    redis: ReplicaRedis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kill -9 of one for good: its requests go on in the other at their next token, exactly; the epoch is fenced."""
    folder = make("llama", tmp_path / "llama")
    spec = ModelSpec(name=MODEL, source=str(folder), dtype="float64", kv_tokens=1000, replicas=2)
    catalog.put_spec(redis.client, spec)
    shared, rids = Shared(redis), ["one", "two", "three"]
    monkeypatch.setattr(exchange_module, "REPLICA_GONE_S", 0.5)
    with replica_process(redis, spec) as first:
        until(lambda: shared.ready("r0"), 60.0)
        shared.ask("whole")
        until(lambda: shared.field("whole", "state") == "finished", 30.0)
        expected = shared.tokens("whole")
        for rid in rids:
            shared.ask(rid)
        until(lambda: all(len(shared.tokens(rid)) >= 20 for rid in rids), 30.0)
        first.send_signal(signal.SIGSTOP)  # so that it can't finish while the other starts
        lost = health.read_epoch(redis.client, MODEL, "r0")
        before = {rid: shared.tokens(rid) for rid in rids}
        assert all(shared.field(rid, "replica") == "r0" and len(before[rid]) < LONG for rid in rids)
        second = LeaderScene(redis, folder, kv_tokens=1000, replica="r1")
        until(lambda: shared.ready("r1"), 60.0)
        first.kill()
        until(lambda: all(shared.field(rid, "state") == "finished" for rid in rids), 60.0)
        second.stop()
    for rid in rids:
        assert shared.tokens(rid) == expected and expected[: len(before[rid])] == before[rid]
        assert shared.field(rid, "replica") == "r1" and shared.field(rid, "attempts") == "2"
    assert health.read_epoch(redis.client, MODEL, "r0") > lost, "a leader that wakes must be fenced"
    assert redis.client.get(ReplicaKeys(MODEL, "r0").lock) is None
