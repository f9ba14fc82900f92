"""A leader gives KV memory back: it does with less, and loses no request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from control.messages import Assignment
from control.placement import farm
from control.records import catalog
from control.replicas import health
from control.replicas.health import Beat
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.waiting import until
from worker.leader.group_leader import GroupLeader
from worker.rank.rank_worker import RankWorker
from worker.repository.assets import read_assets

SHARE = 2000
NEW = 20


class SharingScene(LeaderScene):
    """The leader's process got `SHARE` tokens of KV memory, which the planner chose."""

    def start(self) -> None:
        self.assign()
        self.start_process()

    def assign(self, kv_tokens: int = SHARE, target: int | None = None) -> None:
        spec = msgspec.structs.replace(self.spec, kv_tokens=None)
        assignment = Assignment(
            spec=spec, replica=REPLICA, ranks=[0], devices=["cpu"], kv_tokens=kv_tokens, kv_target=target
        )
        farm.assign(self.redis.client, "host", assignment)

    def start_process(self) -> None:
        assignment = Assignment(spec=self.spec, replica=REPLICA, ranks=[0], devices=["cpu"], kv_tokens=SHARE)
        self.leader = GroupLeader(
            (self.redis.another(), self.redis.blocking(), self.redis.another()),
            assignment,
            "host/1",
            self.files,
            read_assets(self.files, None),
            RankWorker(0, 1, "cpu"),
            "127.0.0.1",
        )
        self.run_in_thread()

    def beat(self) -> Beat | None:
        return health.heartbeats(self.redis.client, MODEL, REPLICA, 1)[0]

    def limit(self) -> int:
        """As its heartbeat tells it; 0 before."""
        beat = self.beat()
        return beat.kv_limit if beat is not None else 0

    def published(self) -> int:
        assets = catalog.get_assets(self.redis.client, MODEL)
        return assets.kv_tokens if assets is not None else 0


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path) -> Iterator[SharingScene]:
    scene = SharingScene(redis, folder, kv_tokens=SHARE)
    yield scene
    scene.stop()


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 31 + index * 7) % 120 + 3 for index in range(length)]


def test_an_idle_leader_gives_back_what_it_keeps(scene: SharingScene) -> None:
    """The ranks are told in a step that belongs to no request; the rest of what is kept stays."""
    for index in range(3):
        scene.ask(f"kept{index}", prompt(index, 400), max_tokens=NEW)
        scene.answer(f"kept{index}")
    until(lambda: (beat := scene.beat()) is not None and beat.kv_kept == 3 * (400 + NEW - 1), 10.0)
    assert scene.limit() == scene.published() == SHARE
    store = scene.leader._rank_worker.store
    assert store.used_tokens == 3 * (400 + NEW - 1)
    scene.assign(target=900)
    until(lambda: scene.limit() == 900, 10.0)
    assert store.used_tokens == 2 * (400 + NEW - 1) + 1, "the token of that step is there until the next one"
    assert scene.published() == 900
    scene.ask("again", prompt(2, 400), max_tokens=NEW)
    assert len(scene.answer("again")) == NEW and scene.log("again")[0].cached == 399


def test_what_runs_goes_on_while_its_memory_is_asked_for(scene: SharingScene) -> None:
    """The limit falls as requests end; each gets the tokens that it gets alone."""
    rids = [f"long{index}" for index in range(4)]
    for index, rid in enumerate(rids):
        scene.ask(rid, prompt(index, 300), max_tokens=100)
    for rid in rids:
        scene.under_way(rid, tokens=1)
    scene.assign(target=600)
    answers = [scene.answer(rid) for rid in rids]
    until(lambda: scene.limit() == 600, 10.0)
    for index, answer in enumerate(answers):
        scene.ask(f"alone{index}", prompt(index, 300), max_tokens=100, cache_salt="nobody else's")
        assert scene.answer(f"alone{index}") == answer


def test_a_share_that_has_fallen_counts_from_the_start_of_an_epoch(scene: SharingScene) -> None:
    """Of a process that was started with more, and of one that has more from before."""
    until(lambda: scene.limit() == SHARE, 20.0)
    scene.assign(kv_tokens=800)
    until(lambda: scene.limit() == 800, 10.0)
    before = scene.epoch()
    health.write_poison(scene.redis.client, MODEL, REPLICA, before, 0, "test", "on purpose")
    until(lambda: scene.epoch() > before and scene.limit() in (800, SHARE), 20.0)
    assert scene.limit() == scene.published() == 800
    scene.stop()
    scene.start_process()
    until(lambda: (beat := scene.beat()) is not None and beat.epoch > before + 1 and beat.kv_limit, 20.0)
    assert scene.limit() == scene.published() == 800


def test_an_assignment_that_redis_lost_raises_no_limit(scene: SharingScene) -> None:
    until(lambda: scene.limit() == SHARE, 20.0)
    scene.assign(target=700)
    until(lambda: scene.limit() == 700, 10.0)
    farm.remove_assignment(scene.redis.client, "host", MODEL, REPLICA)
    scene.assign()
    scene.ask("r", prompt(1, 50), max_tokens=NEW)
    scene.answer("r")
    assert scene.limit() == 700
