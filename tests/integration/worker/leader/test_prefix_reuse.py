"""Prefixes are reused within an epoch: told in the log, exact, and never across one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from control.keys import ModelKeys
from control.replicas import health
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from tests.waiting import until

FIRST = [number % 120 for number in range(3, 83)]
NEW = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("qwen3", tmp_path_factory.mktemp("qwen3"))


def cached(scene: LeaderScene, rid: str) -> list[int | None]:
    """The cached tokens in each entry of a request's log."""
    return [entry.cached for entry in scene.log(rid)]


def first_turn(scene: LeaderScene) -> list[int]:
    """Ask and have it answered; the prompt of the second turn."""
    scene.ask("first", FIRST, max_tokens=NEW)
    answer = [token for token in scene.answer("first") if token is not None]
    assert len(answer) == NEW
    return [*FIRST, *answer, 5, 6, 7]


def test_a_second_turn_reuses_the_first_ones_cache(scene: LeaderScene) -> None:
    """Its first entry says how much was there, its tokens are those that it gets alone, and the beat tells memory."""
    second = first_turn(scene)
    kept = len(FIRST) + NEW - 1
    until(lambda: (beat := health.heartbeats(scene.redis.client, MODEL, REPLICA, 1)[0]) and beat.kv_kept == kept, 10.0)
    scene.ask("second", second, max_tokens=NEW)
    scene.ask("alone", second, max_tokens=NEW, cache_salt="nobody else's")
    assert scene.answer("second") == scene.answer("alone")
    assert cached(scene, "second") == [kept] + [None] * (NEW - 1)
    assert cached(scene, "alone") == [None] * NEW
    counted = [scene.redis.client.hget(ModelKeys(MODEL).request(rid), "cached_tokens") for rid in ("second", "alone")]
    assert counted == [str(kept), None]


def end_epoch(scene: LeaderScene) -> None:
    health.write_poison(scene.redis.client, MODEL, REPLICA, scene.epoch(), 0, "test", "on purpose")


def test_a_recovery_keeps_the_first_word(scene: LeaderScene) -> None:
    """A request that runs through the end of an epoch says what it said, and goes on exactly."""
    second = first_turn(scene)
    scene.ask("second", second, max_tokens=200)
    scene.under_way("second")
    end_epoch(scene)
    scene.ask("alone", second, max_tokens=200, cache_salt="nobody else's")
    assert scene.answer("second") == scene.answer("alone")
    told = cached(scene, "second")
    assert told[0] == len(FIRST) + NEW - 1 and not any(told[1:])


def test_after_an_epoch_nothing_is_left(scene: LeaderScene) -> None:
    """Kept KV goes with the epoch: the same prompt is computed again, and shared again from then on."""
    second, epoch = first_turn(scene), scene.epoch()
    end_epoch(scene)
    until(lambda: scene.epoch() > epoch, 40.0)
    for rid, expected in (("later", None), ("again", len(second) - 1)):
        scene.ask(rid, second, max_tokens=NEW)
        scene.answer(rid)
        assert cached(scene, rid)[0] == expected


def test_a_model_without_a_prefix_cache(redis: ReplicaRedis, folder: Path) -> None:
    """Where the specification says so nothing is kept and nothing shared."""
    scene = LeaderScene(redis, folder)
    scene.stop()
    scene.spec = msgspec.structs.replace(scene.spec, prefix_cache=False)
    scene.start()
    try:
        scene.ask("second", first_turn(scene), max_tokens=NEW)
        scene.answer("second")
        assert not any(cached(scene, "second"))
    finally:
        scene.stop()
