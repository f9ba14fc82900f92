"""A full Redis refuses new requests in clear words; and what runs goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from control import requests
from control.errors import RedisFull
from control.keys import ModelKeys
from control.messages import GenerationRequest, Sampling
from control.redis.connection import connect, run
from control.redis.servers import server_memory
from control.requests import Enqueue
from ops.local.embedded import EmbeddedServer
from tests.integration.api.conftest import ApiProcess, running_api
from tests.leader import ScriptedLeader
from tests.waiting import until

MEMORY = 12 * 1024 * 1024
FULL = MEMORY - 256 * 1024
"""The limit once it is reached: buffers of connections that are freed make no room below it."""
LARGE = {"model": "tiny", "prompt": "x" * 4000, "max_tokens": 8}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The data folder of a private server with little memory."""
    with EmbeddedServer(tmp_path / "data", memory=MEMORY):
        yield tmp_path / "data"


@pytest.fixture
def small(folder: Path) -> Iterator[ScriptedLeader]:
    leader = ScriptedLeader((folder / "url").read_text())
    leader.start()
    yield leader
    leader.stop()


@pytest.fixture
def process(folder: Path, small: ScriptedLeader, tmp_path: Path) -> Iterator[ApiProcess]:
    """It is told the folder: the password stands on no command line."""
    with running_api(str(folder), tmp_path) as api:
        yield api


def fill(redis: Any) -> None:
    """Queue large requests until there is no room."""
    params = GenerationRequest(prompt=[65] * 4000, sampling=Sampling(max_tokens=8))
    for index in range(2_000):
        enqueue = Enqueue(rid=f"r{index}", model="tiny", params=params, tenant="t", on_disconnect="continue")
        try:
            run(redis, requests.enqueue(enqueue))
        except RedisFull:
            return
    raise AssertionError("it was never full")


def wait_for_renewal(redis: Any, lock: str) -> None:
    """Wait until the time that the lock has left, which falls, is more than at the look before."""
    left = redis.pttl(lock)

    def renewed() -> bool:
        nonlocal left
        before, left = left, redis.pttl(lock)
        return left > before

    until(renewed)


def test_full_it_refuses_what_is_new_and_ends_what_runs(
    folder: Path, small: ScriptedLeader, process: ApiProcess
) -> None:
    """Clean refusals, a stream that ends whole, operators who see it; after the retention all goes on."""
    with (
        httpx.Client(base_url=process.url, timeout=40) as http,
        closing(connect((folder / "url").read_text())) as redis,
    ):
        small.pause()
        request_body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=request_body) as running:
            assert running.status_code == 200
            until(lambda: small.claimed)
            small.claiming = False
            fill(redis)
            redis.config_set("maxmemory", FULL)
            refused = http.post("/v1/completions", json=LARGE)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (503, "redis_full"), refused.text
            assert "maxmemory" in error["message"] and int(refused.headers["retry-after"]) >= 1
            [memory] = server_memory(redis)
            assert memory.most == FULL and memory.share > 0.9
            queued = int(redis.hget(ModelKeys("tiny").load, "queued") or 0)
            for path, body in (("chat/completions", request_body), ("responses", {"model": "tiny", "input": "x"})):
                assert http.post(f"/v1/{path}", json=body).status_code == 503
            assert int(redis.hget(ModelKeys("tiny").load, "queued") or 0) == queued
            small.resume()
            *events, done = [line.removeprefix("data: ") for line in running.iter_lines() if line.startswith("data: ")]
            deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
            assert "".join(delta.get("content") or "" for delta in deltas) == "you said hello" and done == "[DONE]"
        limit = re.compile(r"^furrow_redis_max_bytes\{.*\} (\S+)$", re.MULTILINE)
        until(lambda: float(limit.findall(http.get("/metrics").text)[0]) == FULL)
        until(lambda: http.get("/ready").json()["redis"][0]["used_bytes"] > 0.9 * MEMORY)
        until(lambda: any(line.get("action") == "redis_memory" for line in process.lines))
        small.claiming = True
        until(lambda: int(redis.hget(ModelKeys("tiny").load, "queued") or 0) == 0)
        until(lambda: len(small.claimed) > queued)
        for key in redis.scan_iter(ModelKeys("tiny").base + "*:*", count=1000):
            if ":req:" in key or ":log:" in key:
                redis.pexpire(key, 1)  # as two minutes later
        until(lambda: server_memory(redis)[0].share < 0.9)
        again = http.post("/v1/chat/completions", json={**request_body, "stream": False})
        assert again.json()["choices"][0]["message"]["content"] == "you said hello"


def test_a_short_burst_is_not_fatal_for_the_process(folder: Path, small: ScriptedLeader, process: ApiProcess) -> None:
    """Under a maxmemory that everything exceeds, heartbeats and the lock live on, and so does every process."""
    with (
        httpx.Client(base_url=process.url, timeout=40) as http,
        closing(connect((folder / "url").read_text())) as redis,
    ):
        redis.config_set("maxmemory", "1")
        until(lambda: http.post("/v1/completions", json=LARGE).status_code == 503)
        lock = "furrow:{tiny}:r0:lock"
        for _ in range(5):  # renewals, together longer than any heartbeat lives
            wait_for_renewal(redis, lock)
        redis.config_set("maxmemory", MEMORY)
        until(lambda: http.post("/v1/completions", json=LARGE).status_code == 200)
        body: Any = http.get("/health").json()
        assert body == {"status": "ok"}
