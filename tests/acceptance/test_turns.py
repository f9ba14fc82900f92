"""Models take turns in one host's memory: with processes killed in the middle of wakes and evictions."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from ops.demo import MODEL_DIR
from tests.farm import Farm, serving_farm
from tests.waiting import until

pytestmark = pytest.mark.timeout(240)

ROOM = "200MiB"
"""For one of the models."""
VICTIMS = ("leader", "agent", "api")
SETS = ("turns", *VICTIMS)
"""Each test has models of its own: those that were used before count as in use for a while."""
NAMES = [f"{one}-{number}" for one in SETS for number in ("one", "two", "three")]


@pytest.fixture(scope="module")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Farm]:
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        shutil.copytree(MODEL_DIR, folder / name)
    with serving_farm("--models", str(folder), "--memory", ROOM) as farm:
        yield farm


@pytest.fixture
def client(farm: Farm) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=farm.base_url, api_key="none", timeout=120, max_retries=20) as client:
        yield client


def answer(client: openai.OpenAI, model: str) -> str:
    completion = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "Count from 1 to 20."}], temperature=0, max_tokens=60
    )
    return completion.choices[0].message.content or ""


def states(client: openai.OpenAI) -> dict[str, str]:
    return {model.id: model.model_dump()["state"] for model in client.models.list()}


def test_every_model_is_listed_and_none_is_loaded(farm: Farm, client: openai.OpenAI) -> None:
    assert states(client) == dict.fromkeys(NAMES, "sleeping")
    assert farm.ready()
    listed = farm.furrow("models", "list").stdout
    assert all(f"{name} " in listed for name in NAMES) and listed.count("sleeping") == len(NAMES)


def test_models_take_turns(client: openai.OpenAI) -> None:
    """Each answers as ever, and at most one is loaded at a time."""
    answers = [answer(client, f"turns-{number}") for number in ("one", "two", "three")]
    assert len(set(answers)) == 1 and "1, 2, 3" in answers[0]
    until(lambda: [name for name, state in states(client).items() if state == "loaded"] == ["turns-three"], 10)


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_request_survives_a_death_in_the_middle_of_a_wake(farm: Farm, client: openai.OpenAI, victim: str) -> None:
    """Two models want the room of the third; the process dies while the first of them is being woken."""
    expected = answer(client, f"{victim}-three")
    names = [f"{victim}-one", f"{victim}-two"]
    with ThreadPoolExecutor() as pool:
        future: list[Future[str]] = [pool.submit(answer, client, name) for name in names]
        until(lambda: any(farm.redis.hget(f"furrow:{{{name}}}:load", "queued") == "1" for name in names))
        if victim == "leader":
            farm.kill(until(lambda: led(farm, names), 60), 0)
        else:
            module = {"agent": "worker agent", "api": "-m api"}[victim]
            os.kill(until(lambda: process_of(farm, module)), signal.SIGKILL)
        assert [one.result(120) for one in future] == [expected] * 2


def led(farm: Farm, names: list[str]) -> str | None:
    """One of the models that has a leader."""
    return next((name for name in names if farm.redis.exists(f"furrow:{{{name}}}:r0:lock")), None)


def process_of(farm: Farm, words: str) -> int | None:
    """The process of the farm with these words on its command line."""
    for pid in farm.processes():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        if words in line:
            return pid
    return None


def test_a_loss_of_all_data_brings_every_model_back(farm: Farm, client: openai.OpenAI) -> None:
    farm.redis.flushall()
    until(lambda: set(states(client)) == set(NAMES), 30)
    assert "1, 2, 3" in answer(client, "turns-one")
