"""Lost recurrent states cost no token: with an epoch, a preemption or a failed step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from torch import Tensor

from control.replicas.health import write_poison
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from worker.models.served import ServedModel
from worker.native.library import load_library
from worker.scheduling.scheduler import Scheduler

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")

PROMPTS = [[10, 20, 30, 40], list(range(60)), [7, 7, 7]]
TOKENS = 150


@pytest.fixture(scope="module", params=["granitemoehybrid", "lfm2", "qwen3_5_text"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(family, tmp_path_factory.mktemp("recurrent"))


@pytest.fixture
def scene(redis: ReplicaRedis, family: str, folder: Path) -> Iterator[LeaderScene]:
    # One answer and its state fit beside the beginning of another, but not three whole ones.
    scene = LeaderScene(redis, folder, dtype="float32")
    yield scene
    scene.stop()


def alone(scene: LeaderScene) -> list[list[int | None]]:
    """The answers, one after the other."""
    for index, prompt in enumerate(PROMPTS):
        scene.ask(f"alone{index}", prompt, max_tokens=TOKENS)
    return [scene.answer(f"alone{index}") for index in range(len(PROMPTS))]


def poisoned(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    write_poison(scene.redis.client, MODEL, REPLICA, scene.epoch(), -1, "exited", "a test says so")


def torn(scene: LeaderScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that fails once it has changed the states."""
    real, faults = ServedModel.forward, [MemoryError("once")]

    def forward(model: ServedModel, *given: Any) -> Tensor:
        logits = real(model, *given)
        if faults:
            raise faults.pop()
        return logits

    monkeypatch.setattr(ServedModel, "forward", forward)


@pytest.mark.parametrize("strike", [poisoned, torn])
def test_what_ends_an_epoch_costs_no_token(
    scene: LeaderScene, strike: Callable[[LeaderScene, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that are struck together get the tokens of undisturbed ones, each once, in a new epoch."""
    expected = alone(scene)
    before, preempted = scene.epoch(), list[int]()
    real = Scheduler._preempt
    monkeypatch.setattr(Scheduler, "_preempt", lambda self, one: preempted.append(one.sid) or real(self, one))
    for index, prompt in enumerate(PROMPTS):
        scene.ask(f"struck{index}", prompt, max_tokens=TOKENS)
    scene.under_way("struck0")
    strike(scene, monkeypatch)
    assert [scene.answer(f"struck{index}") for index in range(len(PROMPTS))] == expected
    assert len({tuple(answer) for answer in expected}) == len(PROMPTS)
    assert scene.epoch() > before, "the fault had no effect"
    assert preempted, "memory must run out"


def test_a_second_turn_begins_with_a_state_of_the_first(scene: LeaderScene) -> None:
    """A prompt that has 2,000 tokens in common begins with at least 1,800 of them, one that goes on after the answer
    with all; another tenant's with none. All have the tokens of one that begins with nothing, also over an epoch."""
    scene.stop()
    scene.spec = msgspec.structs.replace(scene.spec, kv_tokens=20_000)
    scene.start()
    text = [number * 7 % 120 for number in range(2_000)]
    scene.ask("first", [*text, 5, 6], max_tokens=4)
    answer = [token for token in scene.answer("first") if token is not None]
    for rid, prompt in {"continued": [*text, 5, 6, *answer, 8, 9], "replaced": [*text, 8, 9, 10]}.items():
        scene.ask(rid, prompt, max_tokens=60)
        scene.ask(f"{rid}-alone", prompt, cache_salt=f"only {rid}", max_tokens=60)
        assert scene.answer(rid) == scene.answer(f"{rid}-alone")
    scene.ask("struck", [*text, 8, 9, 10], max_tokens=60)
    scene.under_way("struck", 10)
    write_poison(scene.redis.client, MODEL, REPLICA, scene.epoch(), -1, "exited", "a test says so")
    assert scene.answer("struck") == scene.answer("replaced")
    cached_by_rid = {rid: scene.log(rid)[0].cached for rid in ("continued", "replaced", "replaced-alone", "struck")}
    assert cached_by_rid == {"continued": 2_005, "replaced": 1_984, "replaced-alone": None, "struck": 1_984}
