"""An agent over a model folder, with shell scripts as ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.integration.worker.agent.agent_scene import SCRIPT, AgentScene
from tests.integration.worker.conftest import ReplicaRedis
from tests.supervisor import supervised
from worker.agent import agent as agent_module
from worker.agent import planner
from worker.agent import replica as replica_module


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes the gates; no rank is there to load it."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 8,
        "max_position_embeddings": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(8)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def memory() -> int | None:
    """Bytes that the host may give to ranks; None: it plans no memory."""
    return None


@pytest.fixture
def scene(
    redis: ReplicaRedis, tmp_path: Path, model: Path, memory: int | None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[AgentScene]:
    script = tmp_path / "python"
    script.write_text(SCRIPT.format(folder=tmp_path, python=sys.executable))
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(replica_module, "PAUSES_S", (0.0, 0.0, 0.0))
    monkeypatch.setattr(planner, "REST_S", 0.05)
    monkeypatch.setattr(agent_module, "TICK_S", 0.05)
    monkeypatch.setattr(agent_module, "STEADY_TICK_S", 0.1)
    with supervised() as supervisor:
        scene = AgentScene(redis, tmp_path, model, supervisor, memory)
        yield scene
        scene.stop()
