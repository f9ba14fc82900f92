"""Clients wait for a sleeping model: in its queue; they are told how far it is, and wait no longer than is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from control.keys import ModelKeys
from control.messages import ModelSpec
from control.placement import farm
from control.records import catalog
from control.redis.connection import run
from tests.byte_model import byte_assets
from tests.integration.api.conftest import running_api
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

NAME = "sleeper"


def offer(redis_client: Any) -> None:
    catalog.put_spec(redis_client, ModelSpec(name=NAME, source="script", min_replicas=0))
    run(redis_client, catalog.put_assets(NAME, byte_assets()))


def asked(**fields: Any) -> dict[str, Any]:
    return chat("hello", **fields) | {"model": NAME}


def test_a_client_is_told_that_the_model_is_loading(
    server: Server, leader: ScriptedLeader, redis_client: Any, http: httpx.Client
) -> None:
    offer(redis_client)
    with http.stream("POST", "/v1/chat/completions", json=asked(stream=True)) as response:
        lines = response.iter_lines()
        assert response.status_code == 200 and any(next(lines) == ": loading" for _ in range(3))
    until(lambda: redis_client.hget(ModelKeys(NAME).load, "queued") == "0")


def test_no_client_waits_longer_than_is_allowed(
    server: Server, leader: ScriptedLeader, redis_client: Any, tmp_path: Path
) -> None:
    """As a whole answer and as a stream; its request does not stay behind."""
    offer(redis_client)
    with running_api(server.url, tmp_path, "--max-load-wait", "0.5") as api:
        whole = httpx.post(f"{api.url}/v1/chat/completions", json=asked(), timeout=40)
        assert whole.status_code == 503 and "--max-load-wait" in whole.json()["error"]["message"]
        assert whole.headers["retry-after"]
        stream = httpx.post(f"{api.url}/v1/chat/completions", json=asked(stream=True), timeout=40)
        assert "--max-load-wait" in stream.text and "model_unavailable" in stream.text
    until(lambda: redis_client.hget(ModelKeys(NAME).load, "queued") == "0")


def test_ollama_s_clients_may_wake_a_model(
    server: Server, leader: ScriptedLeader, redis_client: Any, http: httpx.Client
) -> None:
    """A request without a prompt loads a model."""
    offer(redis_client)
    assert not run(redis_client, farm.is_called(NAME))
    answer = http.post("/api/generate", json={"model": NAME})
    assert answer.status_code == 200 and answer.json()["done_reason"] == "load"
    assert run(redis_client, farm.is_called(NAME))
