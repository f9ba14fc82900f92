"""Reloads, scaling and drained hosts cost no answer: every one is whole, and is that of the undisturbed farm."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.acceptance.streams import Received, open_stream, receive
from tests.farm import Farm, clean_environment, furrow, serving_farm
from tests.waiting import until

pytestmark = pytest.mark.timeout(600)

BODY: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from 1 to 100."}],
    "temperature": 0,
    "max_tokens": 120,
}


def streamed(farm: Farm) -> str:
    received = Received()
    for _ in receive(open_stream(farm.address, BODY), received):
        pass
    assert received.finish == "length" and received.errors == [], received.errors
    return received.text


def whole(farm: Farm) -> str:
    connection = http.client.HTTPConnection(farm.address, timeout=90)
    connection.request("POST", "/v1/chat/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    assert response.status == 200, body
    return body["choices"][0]["message"]["content"]


class Clients:
    """Threads that ask one question after the other, and what they got."""

    def __init__(self, farm: Farm) -> None:
        self.farm, self.expected = farm, streamed(farm)
        self.answers: list[str] = []
        self.failures: list[Exception] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(how,)) for how in (streamed, streamed, whole)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, how: Any) -> None:
        while not self._stopping.is_set():
            try:
                self.answers.append(how(self.farm))
            except Exception as error:
                self.failures.append(error)

    def check(self) -> None:
        """There were answers since the last check, and each was whole and right."""
        seen = len(self.answers)
        until(lambda: self.failures or len(self.answers) >= seen + 3)
        assert self.failures == []
        assert set(self.answers) == {self.expected}


@contextmanager
def second_host(farm: Farm) -> Iterator[str]:
    """Another agent, as if on another host."""
    environment = clean_environment(FURROW_REDIS_URL=farm.redis_url, FURROW_HOST_ID="second", FURROW_STANDBY="0")
    process = subprocess.Popen([sys.executable, "-m", "worker.agent.supervision"], env=environment)
    try:
        until(lambda: farm.redis.exists("furrow:host:second"))
        yield "second"
    finally:
        process.terminate()
        process.wait(60)


def replicas(farm: Farm) -> dict[str, str]:
    """Every replica of the list with its host."""
    header, *lines = farm.furrow("models", "list").stdout.splitlines()
    host = header.split().index("HOST")
    return {line.split()[1]: line.split()[host] for line in lines if line.startswith("demo ")}


def leader(farm: Farm) -> int:
    """The process id of the only replica's leader."""
    [name] = replicas(farm)
    return farm.pid("demo", 0, name)


def succeeds(farm: Farm, *arguments: str) -> str:
    ended = furrow(*arguments, timeout=180.0, REDIS_URL=farm.redis_url)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    options = ("--devices", "cpu", "--dtype", "float64", "--kv-tokens", "4000")
    with serving_farm("demo", *options, FURROW_STANDBY="0") as farm:
        yield farm


def test_reloads_and_scaling_under_load_cost_no_answer(farm: Farm) -> None:
    """With one more replica meanwhile, in place, up to two replicas and down again: other processes, the same text."""
    with Clients(farm) as clients:
        pids = [leader(farm)]
        assert "1 of 1 replicas" in succeeds(farm, "models", "reload", "demo", "--wait")
        pids.append(leader(farm))
        clients.check()
        in_place = ("--devices", "cpu", "--dtype", "float64", "--kv-tokens", "5000", "--in-place")
        assert "revision 3, 1 of 1" in succeeds(farm, "models", "load", "demo", *in_place, "--wait")
        pids.append(leader(farm))
        assert len(set(pids)) == 3, "the change had no effect"
        assert "revision 3, 1 of 1" in succeeds(farm, "models", "load", "demo", *in_place[:-1], "--wait")
        assert leader(farm) == pids[-1], "what a running replica can follow starts no other"
        clients.check()
        assert "2 of 2 replicas" in succeeds(farm, "models", "scale", "demo", "--replicas", "2", "--wait")
        clients.check()
        assert "1 of 1 replicas" in succeeds(farm, "models", "scale", "demo", "--replicas", "1", "--wait")
        assert leader(farm) == pids[-1], "the one that stayed was not touched"
        clients.check()
    until(lambda: len(farm.redis.hgetall("furrow:{demo}:replicas")) == 1)


def test_a_host_is_drained_under_load(farm: Farm) -> None:
    """Its replica serves elsewhere before it goes, and comes back once the drain is undone and the other is drained."""
    [first] = set(replicas(farm).values())
    with second_host(farm) as second, Clients(farm) as clients:
        told = succeeds(farm, "drain", first)
        assert "waits for its successor" in told and "empty" in told
        until(lambda: set(replicas(farm).values()) == {second})  # the list shows what left until the next plan
        clients.check()
        succeeds(farm, "drain", first, "--undo")
        succeeds(farm, "drain", second)
        until(lambda: set(replicas(farm).values()) == {first})
        clients.check()
    assert clients.failures == []


def test_a_drain_names_what_is_wrong(farm: Farm) -> None:
    """An unknown host or replica is refused with those that there are."""
    [name] = replicas(farm)
    ended = farm.furrow("drain", "nowhere")
    assert ended.returncode == 1 and "host 'nowhere' is unknown" in ended.stderr
    ended = farm.furrow("drain", "demo:r9")
    assert ended.returncode == 1 and f"no replica 'r9'; it has {name}" in ended.stderr
    ended = farm.furrow("models", "scale", "nobody", "--replicas", "2")
    assert ended.returncode == 1 and "demo" in ended.stderr
