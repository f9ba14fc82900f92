"""Answers outlast every time-out of the API: none of these bounds the whole of an answer."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from control.process import child_environment
from tests.integration.api.conftest import ApiProcess
from tests.integration.api.sse import chat, read_all, text_of
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

SHORT_S = 0.2
LASTS_S = 8 * SHORT_S
SHORTENED = f"""
import importlib, pkgutil, sys
import api
for room in ("http", "generation", "routes"):
    package = importlib.import_module("api." + room)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
for name, module in list(sys.modules.items()):
    if name.startswith("api."):
        for field, value in list(vars(module).items()):
            if field.endswith("_S") and isinstance(value, float) and value > {SHORT_S}:
                setattr(module, field, {SHORT_S})
sys.argv[0] = "api"
import runpy
runpy.run_module("api", run_name="__main__")
"""
"""`python -m api`, with every time in its modules at most SHORT_S."""


class HurriedApi(ApiProcess):
    def start(self) -> None:
        with self.log.open("a") as log:
            command = [sys.executable, "-c", SHORTENED, *self._arguments]
            environment = child_environment(FURROW_LOG_FORMAT="json")
            self.process = subprocess.Popen(command, stderr=log, stdout=log, env=environment)
        until(self._answers, 40)


@pytest.fixture
def hurried(server: Server, leader: ScriptedLeader, tmp_path: Path) -> Iterator[httpx.Client]:
    api = HurriedApi(server.url, tmp_path)
    try:
        with httpx.Client(base_url=api.url, timeout=40) as client:
            yield client
    finally:
        api.stop()


def test_an_answer_may_last_longer_than_every_time_out(hurried: httpx.Client, leader: ScriptedLeader) -> None:
    """A stream and a body, whose tokens come one by one for eight times as long, are whole."""
    leader.pause()
    text = "a long story " * 4 + "ends"

    def streamed() -> str:
        with hurried.stream("POST", "/v1/chat/completions", json=chat(text, stream=True)) as response:
            return text_of(read_all(response))

    def whole() -> str:
        response = hurried.post("/v1/chat/completions", json=chat(text))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(streamed), pool.submit(whole)]
        until(lambda: len(leader.claimed) == 2, 40.0)
        began = time.monotonic()
        while time.monotonic() - began < LASTS_S:
            leader.step()
            time.sleep(SHORT_S / 2)
            assert not any(answer.done() for answer in answers), "an answer was cut"
        leader.resume()
        assert [answer.result(40) for answer in answers] == [f"you said {text}"] * 2
