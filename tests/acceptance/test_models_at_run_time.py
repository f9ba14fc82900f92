"""Models are loaded and unloaded while the farm runs: listed, served, and what is refused on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from control.redis.connection import connect
from control.replicas.model_overviews import overviews
from tests.farm import Farm
from tests.models import make
from tests.waiting import until

pytestmark = pytest.mark.timeout(180)


def row(farm: Farm, name: str) -> list[str]:
    """The model's line of `furrow models list`, as words; empty if it has none."""
    lines = farm.furrow("models", "list").stdout.splitlines()
    return next((line.split() for line in lines if line.startswith(f"{name} ")), [])


def state(farm: Farm, name: str) -> str:
    """As the list has it in its third column, read without a process for each look; or "absent"."""
    with connect(farm.redis_url) as client:
        model_overviews = [overview for overview in overviews(client) if overview.model == name]
    return model_overviews[0].replicas[0].state if model_overviews and model_overviews[0].replicas else "absent"


def kept(farm: Farm, model: str) -> set[str]:
    """The last parts of the replica's keys."""
    return {key.rpartition(":")[2] for key in farm.redis.scan_iter(f"furrow:{{{model}}}:r0:*")}


def test_a_model_that_is_loaded_answers_and_is_404_once_unloaded(
    farm: Farm, client: openai.OpenAI, tmp_path: Path
) -> None:
    """A second model is loaded beside the first, answers, is unloaded, and then is 404 again."""
    folder = make("llama", tmp_path / "tiny")
    loaded = farm.furrow("models", "load", str(folder), "--devices", "cpu", "--dtype", "float64")
    assert loaded.returncode == 0, loaded.stderr
    until(lambda: state(farm, "tiny") == "loaded")
    assert row(farm, "tiny")[2] == "loaded"
    until(lambda: "tiny" in [model.id for model in client.models.list()])
    answer = client.completions.create(model="tiny", prompt="abc", max_tokens=8, temperature=0)
    assert answer.usage is not None and answer.usage.completion_tokens <= 8
    again = farm.furrow("models", "load", str(folder), "--devices", "cpu", "--dtype", "float64")
    assert again.returncode == 1 and "already loaded" in again.stderr
    assert farm.furrow("models", "unload", "tiny").returncode == 0
    until(lambda: state(farm, "tiny") == "absent")
    assert row(farm, "tiny") == []
    until(lambda: "tiny" not in [model.id for model in client.models.list()])
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="tiny", prompt="abc", max_tokens=8)
    assert state(farm, "demo") == "loaded"
    until(lambda: kept(farm, "tiny") <= {"epoch", "epochs", "claim", "poisons"})  # heartbeats lapse by themselves


def test_an_unload_waits_for_the_requests_that_run(farm: Farm, client: openai.OpenAI, tmp_path: Path) -> None:
    """A stream that runs when its model is unloaded is finished, whole."""
    folder = make("llama", tmp_path / "leaving")
    farm.furrow("models", "load", str(folder), "--devices", "cpu", "--dtype", "float64")
    until(lambda: state(farm, "leaving") == "loaded")
    body: dict[str, Any] = {"model": "leaving", "prompt": "abc", "temperature": 0, "extra_body": {"ignore_eos": True}}
    chunks = client.completions.create(**body, max_tokens=400, stream=True)
    next(chunks)
    farm.furrow("models", "unload", "leaving")
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert reasons == ["length"]
    until(lambda: state(farm, "leaving") == "absent")


def test_a_model_that_can_not_be_loaded_is_failed_with_its_reason_and_can_be_unloaded(
    farm: Farm, client: openai.OpenAI, tmp_path: Path
) -> None:
    """The list says why, clients get a 503 with the same words, nothing else suffers, and unload clears it."""
    folder = make("llama", tmp_path / "odd")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "perceptron"}))
    farm.furrow("models", "load", str(folder), "--devices", "cpu")
    until(lambda: state(farm, "odd") == "failed")
    assert "perceptron" in " ".join(row(farm, "odd"))
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model="odd", prompt="abc", max_tokens=8)
    assert caught.value.status_code in (404, 503) and "odd" in str(caught.value)
    assert farm.furrow("models", "unload", "odd").returncode == 0
    until(lambda: state(farm, "odd") == "absent")


def test_unloading_what_is_not_there_names_what_is(farm: Farm) -> None:
    """The refusal lists the models that could be meant."""
    ended = farm.furrow("models", "unload", "nobody")
    assert ended.returncode == 1 and "'nobody'" in ended.stderr and "demo" in ended.stderr
