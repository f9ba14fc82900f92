"""An API process as a whole: many streams, waiting, a full queue, readiness, metrics."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from control.keys import ModelKeys
from control.replicas import health
from tests.byte_model import byte_assets
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat, events, text_of
from tests.leader import ScriptedLeader
from tests.servers import NEW, Server, serving
from tests.waiting import until

CHAT = "/v1/chat/completions"


@pytest.fixture
def impatient(server: Server, leader: ScriptedLeader, tmp_path: Path) -> Iterator[ApiProcess]:
    """A process with a short keep-alive and room for two waiting requests."""
    with running_api(server.url, tmp_path, "--keep-alive", "0.3", "--max-queued", "2") as api:
        yield api


def test_no_torch_in_an_api_process(
    server: Server, leader: ScriptedLeader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all modules that a process imports until it has served a request, none is torch's or transformers'."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    with running_api(server.url, tmp_path, cold=True) as api:
        assert httpx.post(f"{api.url}{CHAT}", json=chat("x"), timeout=20).status_code == 200
        lines = (line for line in api.log.read_text().splitlines() if line.startswith("import time:"))
        imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    assert {"litestar", "api", "control"} <= imported
    assert not {"torch", "transformers", "worker"} & imported


async def test_64_streams_in_order(api: ApiProcess, leader: ScriptedLeader) -> None:
    """64 clients at once each get their own text, whole and in order, one terminal line each."""
    leader.reply = lambda prompt: " ".join(f"{prompt.rpartition(': ')[2].strip()}-{word}" for word in range(40))

    async def one(client: httpx.AsyncClient, name: str) -> tuple[str, str]:
        async with client.stream("POST", CHAT, json=chat(name, stream=True)) as response:
            lines = [line async for line in response.aiter_lines()]
            return response.headers["x-request-id"], text_of(events(lines))

    limits = httpx.Limits(max_connections=64)
    async with httpx.AsyncClient(base_url=api.url, timeout=40, limits=limits) as client:
        answers = await asyncio.gather(*(one(client, f"c{index}") for index in range(64)))
    for index, (_, text) in enumerate(answers):
        assert text == " ".join(f"c{index}-{word}" for word in range(40))
    for rid, _ in answers:
        assert len(until(lambda rid=rid: api.ended(rid))) == 1


def test_comments_while_it_waits(impatient: ApiProcess, leader: ScriptedLeader) -> None:
    """A waiting stream tells its queue position, then keeps alive, and the log warns with waited_ms."""
    leader.claiming = False
    with httpx.stream("POST", f"{impatient.url}{CHAT}", json=chat("x", stream=True), timeout=40) as response:
        comments: list[str] = []
        events_read = events(response.iter_lines())
        while "queue position 1" not in comments or "keep-alive" not in comments:
            comments.append(str(next(events_read).comment))
        warning = until(lambda: [line for line in impatient.lines if line.get("action") == "request_waits"])[0]
        assert warning["rid"] == response.headers["x-request-id"]
        assert warning["waited_ms"] >= 2000
        leader.claiming = True
        assert text_of(events_read) == "you said x"


def test_comments_tell_the_expected_wait_and_its_end(
    impatient: ApiProcess, leader: ScriptedLeader, redis_client: Any
) -> None:
    """Where enough was seen to tell: ten ends in 300 s, one request ahead. A claim before the first token is told."""
    leader.claiming = False
    load = ModelKeys("tiny").load
    redis_client.hset(load, mapping={"busy_ms": 300_000, "busy_ends": 9, "busy_since": 1})
    first = threading.Thread(
        target=httpx.post, args=(f"{impatient.url}{CHAT}",), kwargs={"json": chat("x"), "timeout": 40}
    )
    first.start()
    until(lambda: redis_client.hget(load, "queued") == "1")
    with httpx.stream("POST", f"{impatient.url}{CHAT}", json=chat("y", stream=True), timeout=40) as response:
        events_read = events(response.iter_lines())
        place = re.fullmatch(r"queue position 2, expected wait (\d+) ms", str(next(events_read).comment))
        assert place is not None and 20_000 < int(place[1]) <= 30_000
        leader.pause()
        leader.claiming = True
        assert "claimed" in iter(lambda: next(events_read).comment, None)
        leader.resume()
        assert text_of(events_read) == "you said y"
    first.join()


def test_a_claimed_request_has_no_queue_position(impatient: ApiProcess, leader: ScriptedLeader) -> None:
    """A long prompt is computed for minutes before its first token; the log does not say that it is queued."""
    leader.pause()
    with httpx.stream("POST", f"{impatient.url}{CHAT}", json=chat("x", stream=True), timeout=40) as response:
        warned = {"action": "request_waits", "rid": response.headers["x-request-id"], "queue_position": None}
        until(lambda: [line for line in impatient.lines if warned.items() <= line.items()])
        leader.resume()
        assert text_of(events(response.iter_lines())) == "you said x"


def test_a_full_queue_answers_429_with_retry_after(
    impatient: ApiProcess, leader: ScriptedLeader, redis_client: Any
) -> None:
    """Beyond its bound the queue answers 429 with Retry-After, in seconds and in milliseconds."""
    leader.claiming = False
    threads = [
        threading.Thread(target=httpx.post, args=(f"{impatient.url}{CHAT}",), kwargs={"json": chat("x"), "timeout": 15})
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    until(lambda: redis_client.hget(ModelKeys("tiny").load, "queued") == "2")
    response = httpx.post(f"{impatient.url}{CHAT}", json=chat("x"))
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert int(response.headers["retry-after"]) >= 1
    assert int(response.headers["retry-after-ms"]) >= 1000
    leader.claiming = True
    for thread in threads:
        thread.join()


def test_a_refused_part_takes_the_others_along(
    impatient: ApiProcess, leader: ScriptedLeader, redis_client: Any
) -> None:
    """Three prompts where two places are free: none of them stays in the queue, though all were to outlive a client."""
    leader.claiming = False
    body = {"model": "tiny", "prompt": ["a", "b", "c"], "max_tokens": 4, "on_disconnect": "continue"}
    assert httpx.post(f"{impatient.url}/v1/completions", json=body).status_code == 429
    until(lambda: redis_client.hget(ModelKeys("tiny").load, "queued") == "0")
    leader.claiming = True


def test_too_long_a_wait_is_refused_unless_it_does_not_matter(
    api: ApiProcess, leader: ScriptedLeader, redis_client: Any
) -> None:
    """Where the queue drains too slowly for the default limit a request gets 429; one of low priority waits."""
    leader.claiming = False
    slow = {"busy_ms": 700_000, "busy_ends": 9, "busy_since": 1}
    redis_client.hset(ModelKeys("tiny").load, mapping=slow)

    def ask(**fields: Any) -> httpx.Response:
        # As a tenant of its own: a refusal stands for a moment, and the next test asks the same process.
        mine = {"authorization": "Bearer impatient"}
        return httpx.post(f"{api.url}{CHAT}", json=chat("x", **fields), headers=mine, timeout=40)

    threads = [threading.Thread(target=ask), threading.Thread(target=ask, kwargs={"priority": "low"})]
    for index, thread in enumerate(threads):
        thread.start()
        until(lambda index=index: redis_client.hget(ModelKeys("tiny").load, "queued") == str(index + 1))
    refused = ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "60"), "70 s, told as the most that is"
    assert "priority low" in refused.json()["error"]["message"]
    leader.claiming = True
    for thread in threads:
        thread.join()


def test_ready_and_a_failed_model_tell_cause_and_remedy(
    http: httpx.Client, leader: ScriptedLeader, redis_client: Any
) -> None:
    """/ready says what the farm can do, and a failed model answers 503 with the cause and the remedy."""
    assert http.get("/ready").json()["ready"] is True
    health.write_status(redis_client, "tiny", "r0", "failed", "the weights are gone")
    try:
        ready = http.get("/ready")
        assert ready.status_code == 503
        assert "tiny failed to load: the weights are gone" in ready.json()["reason"]
        refused = http.post(CHAT, json=chat("x"))
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        assert refused.json()["error"]["message"] == (
            "Model 'tiny' failed to load: the weights are gone. Repair the cause, then run `furrow models reload tiny`"
        )
    finally:
        health.clear_status(redis_client, "tiny", "r0")
    assert http.get("/ready").status_code == 200


def test_ready_wants_a_token(tmp_path: Path) -> None:
    """A model whose ranks beat but that makes no token is not ready; a token makes it so without a client's request."""
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url)
        leader.claiming = False
        leader.start()
        with running_api(server.url, tmp_path) as api:
            stuck = httpx.get(f"{api.url}/ready", timeout=40)
            assert stuck.status_code == 503
            assert "no token came" in stuck.json()["reason"]
            leader.claiming = True
            assert httpx.get(f"{api.url}/ready", timeout=40).status_code == 200
            assert len(leader.claimed) == 1
            assert httpx.get(f"{api.url}/ready", timeout=40).status_code == 200
            assert len(leader.claimed) == 1  # the proof still holds
        leader.stop()


def test_metrics_count_what_was_served(http: httpx.Client, leader: ScriptedLeader) -> None:
    """The counters move with what was served."""

    def counts() -> list[float]:
        lines = http.get("/metrics").text.splitlines()
        names = [f"furrow_api_{which}_tokens_total " for which in ("completion", "prompt", "cached_prompt")]
        return [float(next(line for line in lines if line.startswith(name)).split()[-1]) for name in names]

    leader.cached = 3
    before = counts()
    usage = http.post(CHAT, json=chat("hello")).json()["usage"]
    assert usage["completion_tokens"] == len("you said hello") + 1
    moved = [after - earlier for after, earlier in zip(counts(), before, strict=True)]
    assert moved == [usage["completion_tokens"], usage["prompt_tokens"], 3]


def test_api_key_is_required_and_served_model_name_is_an_alias(
    server: Server, leader: ScriptedLeader, tmp_path: Path
) -> None:
    """With --api-key a request needs the key; --served-model-name is a name for the only model."""
    with running_api(server.url, tmp_path, "--api-key", "k1", "--served-model-name", "public") as api:
        refused = httpx.post(f"{api.url}{CHAT}", json=chat("x"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        headers = {"authorization": "Bearer k1"}
        answer = httpx.post(f"{api.url}{CHAT}", json=chat("x", model="public"), headers=headers)
        assert answer.json()["model"] == "public"
        names = [model["id"] for model in httpx.get(f"{api.url}/v1/models", headers=headers).json()["data"]]
        assert names == ["public", "tiny"]


def test_a_model_with_a_slash(server: Server, leader: ScriptedLeader, http: httpx.Client) -> None:
    """A second model, whose name has a slash, is found at once, and is then one of two."""
    second = ScriptedLeader(server.url, "org/second", byte_assets(context_length=99))
    second.start()
    try:
        assert http.post(CHAT, json=chat("x", model="org/second")).status_code == 200
        assert http.get("/v1/models/org/second").json()["max_model_len"] == 99
        body = chat("x")
        del body["model"]
        assert http.post(CHAT, content=json.dumps(body)).status_code == 404
    finally:
        second.stop()
        from control.records import catalog
        from control.redis.connection import connect

        with connect(server.url) as client:
            spec = catalog.get_spec(client, "org/second")
            assert spec is not None
            catalog.forget(client, spec)
