"""A model folder that is away is looked for again: with its cause told, and found by itself."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from control.messages import ModelAssets
from control.records import catalog
from tests.integration.worker.agent.agent_scene import AgentScene
from tests.integration.worker.conftest import MODEL
from tests.waiting import until
from worker.repository import preparation


def loaded_before(scene: AgentScene) -> None:
    """Publish the assets of the model, as a leader that loaded it."""
    nothing: dict[str, Any] = {}
    assets = ModelAssets(
        tokenizer_json="{}",
        tokenizer_config=nothing,
        chat_template=None,
        generation_config=nothing,
        context_length=64,
        vocab_size=8,
        eos_ids=[2],
        kv_tokens=1000,
        created=1,
    )
    scene.redis.run(catalog.put_assets(MODEL, assets))


def test_a_folder_that_comes_back_is_found(scene: AgentScene) -> None:
    """While it is looked for the status tells the cause; nobody needs to load the model again."""
    loaded_before(scene)
    away = scene.model.rename(scene.folder / "unmounted")
    scene.want()
    waiting = until(lambda: (status := scene.status()).get("state") == "backoff" and status, 40.0)
    assert f"{scene.model} does not exist" in waiting["detail"]
    assert "next try is in" in waiting["detail"]
    away.rename(scene.model)
    until(lambda: len(scene.pids(0)) == len(scene.pids(1)) == 1, 40.0)
    assert scene.status()["state"] == "running"


def test_a_folder_that_stays_away_is_given_up(scene: AgentScene, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last try the model is failed, with the cause and how often it was tried."""
    monkeypatch.setattr(preparation, "PAUSES_S", (0.0, 0.0))
    loaded_before(scene)
    scene.model.rename(scene.folder / "unmounted")
    scene.want()
    until(lambda: scene.status().get("state") == "failed", 40.0)
    assert "does not exist" in scene.status()["detail"] and "Tried 3 times" in scene.status()["detail"]
    assert scene.pids(0) == []


def test_a_model_that_was_never_loaded_fails_at_once(scene: AgentScene) -> None:
    """Its source is named wrongly more often than it is away."""
    began = time.monotonic()
    scene.want(source=str(scene.folder / "tpyo"))
    until(lambda: scene.status().get("state") == "failed", 40.0)
    assert "does not exist" in scene.status()["detail"] and "Tried" not in scene.status()["detail"]
    assert time.monotonic() - began < sum(preparation.PAUSES_S)


def test_what_can_not_be_served_fails_at_once(scene: AgentScene) -> None:
    """Another try ends alike, whatever was loaded before."""
    loaded_before(scene)
    (scene.model / "config.json").write_text(json.dumps({"model_type": "perceptron"}))
    scene.want()
    until(lambda: scene.status().get("state") == "failed", 40.0)
    assert "perceptron" in scene.status()["detail"] and "Tried" not in scene.status()["detail"]


def test_a_change_of_mind_is_followed_while_files_are_away(scene: AgentScene, tmp_path: Path) -> None:
    """The model is wanted from another folder: that one is taken, at once."""
    loaded_before(scene)
    away = scene.model.rename(tmp_path / "elsewhere")
    scene.want()
    until(lambda: scene.status().get("state") == "backoff", 40.0)
    scene.want(source=str(away))
    until(lambda: len(scene.pids(0)) == 1, 40.0)
