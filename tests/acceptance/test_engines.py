"""Streams of external engines survive kills: of the engine, its leader and its agent.

The engines are scripted servers, started by the farm as the real ones are. Their tokens follow from those before, so a
stream that was struck equals one that was not. `ops/bench/recovery/survival.py` does the same with real engines.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from control.engines import ENGINES
from ops.demo import MODEL_DIR
from ops.harness import scripted_engine
from tests import gguf_models
from tests.farm import Farm, furrow, serving_farm
from tests.waiting import until
from worker.external.host import CLASSES

pytestmark = pytest.mark.timeout(240)

STREAMS = 16
TOKENS = 120


def command_of(shape: str) -> str:
    return f"{shape}={sys.executable} {scripted_engine.__file__} {shape}"


@contextmanager
def farm_on(shape: str, model: Path = MODEL_DIR) -> Iterator[Farm]:
    """A farm that serves a model on a scripted engine, sixty tokens a second to each stream."""
    at_once = f"{CLASSES[shape].sequences[0]}={STREAMS}"
    options = ("--name", "m", "--engine", shape, "--engine-command", command_of(shape), "--engine-arg", at_once)
    with serving_farm(str(model), *options, SCRIPTED_RATE="60", SCRIPTED_LAST="120") as farm:
        yield farm


def ids_of(farm: Farm, first: int) -> list[int]:
    """The token ids of one whole stream."""
    body = {
        "model": "m",
        "prompt": f"Count from {first}:",
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{farm.base_url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    ids: list[int] = []
    finish: str | None = None
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    ids += choice.get("token_ids") or []
                    finish = choice["finish_reason"] or finish
    assert finish == "length"
    return ids


def engine_process(farm: Farm) -> psutil.Process:
    """The engine of this farm."""

    program = Path(scripted_engine.__file__).name

    def look() -> psutil.Process | None:
        for child in psutil.Process(farm.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it has just ended
                if program in " ".join(child.cmdline()[:3]) and child.status() != psutil.STATUS_ZOMBIE:
                    return child
        return None

    return until(look)


def struck(farm: Farm, strike: Callable[[], object]) -> None:
    """Every stream that runs during the strike equals its undisturbed run."""
    with ThreadPoolExecutor(STREAMS) as pool:
        expected = list(pool.map(lambda first: ids_of(farm, first), range(STREAMS)))
        running = [pool.submit(ids_of, farm, first) for first in range(STREAMS)]
        until(lambda: farm.redis.zcard("furrow:{m}:r0:running") == STREAMS)
        strike()
        assert [one.result() for one in running] == expected
    assert all(len(ids) == TOKENS for ids in expected)


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    with farm_on("vllm") as farm:
        yield farm


def test_a_killed_engine_is_started_again_and_every_stream_goes_on(farm: Farm) -> None:
    before = engine_process(farm)
    struck(farm, lambda: before.send_signal(signal.SIGKILL))
    assert engine_process(farm).pid != before.pid


def test_a_killed_leader_goes_on_with_the_engine_that_runs(farm: Farm) -> None:
    before = engine_process(farm).pid
    struck(farm, lambda: farm.kill("m", 0))
    assert engine_process(farm).pid == before, "the engine keeps its weights"


def test_an_agent_that_dies_leaves_the_engine_and_its_streams(farm: Farm) -> None:
    before = engine_process(farm).pid
    agent = next(
        child
        for child in psutil.Process(farm.process.pid).children(recursive=True)
        if child.cmdline()[-2:] == ["worker", "agent"]
    )
    struck(farm, lambda: agent.send_signal(signal.SIGKILL))
    assert engine_process(farm).pid == before
    until(farm.ready)


def test_a_stopped_engine_is_replaced(farm: Farm) -> None:
    """SIGSTOP: nothing ends by itself, so the leader's deadline has to find it."""
    before = engine_process(farm)
    struck(farm, lambda: before.send_signal(signal.SIGSTOP))
    until(lambda: not before.is_running() or before.status() == psutil.STATUS_ZOMBIE)


def test_what_the_engine_can_not_do_is_refused_with_its_name(farm: Farm) -> None:
    body = {"model": "m", "prompt": "x", "typical_p": 0.5}
    request = urllib.request.Request(
        f"{farm.base_url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    answer = json.loads(refused.value.read())["error"]
    refused.value.close()
    assert refused.value.code == 400 and "vLLM" in answer["message"] and answer["param"] == "typical_p"


def test_an_engine_that_can_not_start_says_why_in_its_own_words(tmp_path: Path) -> None:
    """No stream hangs: the model fails with the last line of the engine's log."""
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'ValueError: this model type is unknown' >&2\nexit 3\n")
    broken.chmod(0o755)
    command = f"vllm={broken}"
    ended = furrow("serve", str(MODEL_DIR), "--engine", "vllm", "--engine-command", command, "--port", "0", timeout=120)
    assert ended.returncode != 0
    assert "this model type is unknown" in ended.stderr and "status 3" in ended.stderr


@pytest.mark.parametrize("shape", [name for name in ENGINES if name != "vllm"])
def test_the_other_engines_outlive_a_kill(shape: str, tmp_path: Path) -> None:
    model = gguf_models.make("llama", tmp_path, ["f32"])[0] if ENGINES[shape].gguf else MODEL_DIR
    with farm_on(shape, model) as farm:
        struck(farm, lambda: engine_process(farm).send_signal(signal.SIGKILL))


def test_no_engine_is_left_behind(tmp_path: Path) -> None:
    """Neither where the whole farm is killed, nor where only the host's supervisor is."""
    with farm_on("vllm") as farm:
        before = engine_process(farm)
        holder = before.parent()
        supervisor = None if holder is None else holder.parent()
        assert supervisor is not None and supervisor.name() == "furrow-worker"
        supervisor.kill()
        until(lambda: not before.is_running() or before.status() == psutil.STATUS_ZOMBIE)
        until(lambda: engine_process(farm).pid != before.pid)
        after = engine_process(farm)
        os.kill(farm.process.pid, signal.SIGKILL)
        until(lambda: not after.is_running() or after.status() == psutil.STATUS_ZOMBIE)
