"""Slow steps kill, poison and bury nothing: a machine that is slow is not dead.

Deadlines are a twentieth of the real ones, and 50 prompt tokens a second stand for less than 10.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from control.redis.connection import run
from control.replicas import health
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from worker.models.torch.served import TorchModel
from worker.rank import heartbeat as heartbeat_module

PROMPT = [10 + at % 80 for at in range(200)]
PER_TOKEN_S = 0.02


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=4)


class SlowScene(LeaderScene):
    """A leader whose layers take their time once `slow` is set."""

    slow: threading.Event

    def poisons(self) -> list[health.Poison]:
        return run(self.redis.client, health.poison_history(MODEL, REPLICA))


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowScene]:
    monkeypatch.setattr(heartbeat_module, "UNKNOWN_STEP_S", heartbeat_module.UNKNOWN_STEP_S / 20)
    monkeypatch.setattr(heartbeat_module, "PER_TOKEN_S", heartbeat_module.PER_TOKEN_S / 20)
    monkeypatch.setattr(heartbeat_module, "STEP_FLOOR_S", 0.5)
    slow, real = threading.Event(), TorchModel.__init__

    def slowed(model: TorchModel, module: Any, *rest: Any, **more: Any) -> None:
        real(model, module, *rest, **more)
        layers = module.base_model.layers

        def wait(_layer: Any, arguments: tuple[Any, ...], _output: Any) -> None:
            if slow.is_set():
                time.sleep(PER_TOKEN_S * arguments[0].shape[1] / len(layers))

        for layer in layers:
            layer.register_forward_hook(wait)

    monkeypatch.setattr(TorchModel, "__init__", slowed)
    SlowScene.slow = slow
    scene = SlowScene(redis, folder, kv_tokens=4000)
    yield scene
    slow.clear()
    scene.stop()


def test_a_prompt_on_a_slow_machine_is_computed_in_one_epoch(scene: SlowScene) -> None:
    """Its chunks take longer than a hang is given on a quick machine, and show progress all along."""
    scene.ask("quick", PROMPT, max_tokens=8)
    expected, epoch = scene.answer("quick"), scene.epoch()
    scene.slow.set()
    scene.ask("slow", PROMPT, max_tokens=8, cache_salt="another")
    assert scene.answer("slow") == expected
    assert scene.poisons() == [] and scene.epoch() == epoch


def test_a_first_prompt_on_a_slow_machine_is_fed_by_short_chunks(scene: SlowScene) -> None:
    """Nothing was measured before it, so it begins with a short chunk and goes on as fast as that one was."""
    scene.slow.set()
    scene.ask("slow", PROMPT, max_tokens=2)
    longest = 0
    while scene.state("slow") in ("queued", "running"):
        beat = health.heartbeats(scene.redis.client, MODEL, REPLICA, 1)[0]
        longest = max(longest, beat.oldest_pending_ms if beat is not None else 0)
        time.sleep(0.02)
    assert scene.poisons() == []
    assert longest < 2500, "one chunk would have taken four seconds"
