"""A leader publishes its backend; and names it in the logs of its requests, once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from control.errors import GroupError
from control.records.backend import backends
from control.redis.connection import run
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from tests.waiting import until
from worker.models.served import ServedModel
from worker.native.host import SWITCH
from worker.native.library import load_library
from worker.repository.fingerprint import fingerprints

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")


@pytest.fixture
def scene(redis: ReplicaRedis, tmp_path: Path) -> Iterator[LeaderScene]:
    scene = LeaderScene(redis, make("llama", tmp_path, max_position_embeddings=2048))
    yield scene
    scene.stop()


def test_a_request_that_goes_on_with_other_kernels_says_so(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 in C++, again in C++, then in torch: the first and the third life of the replica are named."""
    forward = ServedModel.forward

    def slow(*given: Any) -> Any:
        time.sleep(0.002)
        return forward(*given)

    monkeypatch.setattr(ServedModel, "forward", slow)
    told: list[str] = []
    scene.spec = msgspec.structs.replace(scene.spec, dtype="float32")
    for life in range(3):
        scene.stop()
        if life == 2:
            monkeypatch.setenv(SWITCH, "0")
        scene.start()
        if life == 0:
            scene.ask("a")
        scene.under_way("a", tokens=20 + 20 * life)
        [backend] = run(scene.redis.client, backends(MODEL)).values()
        assert backend.weights == fingerprints(scene.files, "float32").stored and backend.tp == 1
        told.append(backend.fingerprint)
    scene.answer("a")
    assert told[0] == told[1] != told[2]
    assert [entry.fingerprint for entry in scene.log("a") if entry.fingerprint] == [told[0], told[2]]
    assert scene.log("a")[0].fingerprint == told[0]
    assert list(run(scene.redis.client, backends(MODEL))) == [REPLICA]


def test_a_deterministic_model_is_not_served_by_torch(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """In C++ it is; else the load fails with the reason, before anything is published."""
    scene.stop()
    scene.spec = msgspec.structs.replace(scene.spec, dtype="float32", deterministic=True)
    scene.start()
    scene.ask("a", max_tokens=3)
    assert len(scene.answer("a")) == 3
    scene.stop()
    scene.redis.client.delete(scene.keys.backends)
    monkeypatch.setenv(SWITCH, "0")
    scene.start()
    until(lambda: scene.ended, 40.0)
    [error] = scene.ended
    assert isinstance(error, GroupError) and "--deterministic: the order of sums" in str(error)
    assert "transformers" in str(error) and run(scene.redis.client, backends(MODEL)) == {}
    scene.ended.clear()
