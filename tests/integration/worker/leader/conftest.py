"""A leader with a tiny model; a test file that needs another model or another leader overrides the fixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.worker.conftest import ReplicaRedis
from tests.integration.worker.leader_scene import LeaderScene
from tests.models import make
from worker.leader import exchange


@pytest.fixture(autouse=True)
def frequent_emissions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests strike requests of tiny models while they run: most of such an answer would be one emission."""
    monkeypatch.setattr(exchange, "GATHER_S", 0.008)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("llama"), max_position_embeddings=2048)


@pytest.fixture
def scene(redis: ReplicaRedis, folder: Path) -> Iterator[LeaderScene]:
    scene = LeaderScene(redis, folder)
    yield scene
    scene.stop()
