"""Responses and messages outlive their API process: resumed elsewhere, and stored by another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from control import keys
from control.records.responses import KEYLESS
from ops.client import ResumingTransport
from tests.integration.api.conftest import IN_A_HURRY, ApiProcess, running_api
from tests.integration.api.sse import blocks
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

RECORDS = keys.ResponseKeys(KEYLESS)
SAID = "you said hello"
RESPONSE = {"model": "tiny", "input": "hello", "stream": True}
MESSAGE = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}], "stream": True}


@pytest.fixture(scope="module")
def api(
    server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    """Its rounds come every 0.3 seconds."""
    with running_api(server.url, tmp_path_factory.mktemp("api"), constants=IN_A_HURRY) as process:
        yield process


@pytest.fixture(scope="module")
def other(server: Server, api: ApiProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A second process, which knows nothing of what the first one does."""
    with (
        running_api(server.url, tmp_path_factory.mktemp("other")) as process,
        httpx.Client(base_url=process.url, timeout=40) as client,
    ):
        yield client


@pytest.fixture
def doomed(server: Server, leader: ScriptedLeader, tmp_path: Path) -> Iterator[ApiProcess]:
    with running_api(server.url, tmp_path) as process:
        yield process


@pytest.mark.parametrize(("path", "body"), [("/v1/responses", RESPONSE), ("/v1/messages", MESSAGE)])
def test_every_place_can_be_resumed(
    http: httpx.Client, other: httpx.Client, leader: ScriptedLeader, path: str, body: dict[str, Any]
) -> None:
    """After each single event, another process sends exactly those that come after it, byte for byte."""
    response = http.post(path, json=body)
    whole = blocks(response.text)
    rid = response.headers["x-request-id"]
    for place, event in enumerate(whole):
        last = event.partition("\n")[0].removeprefix("id: ")
        resumed = other.get(f"/v1/requests/{rid}/events", headers={"last-event-id": last})
        assert timeless(blocks(resumed.text)) == timeless(whole[place + 1 :]), last


def timeless(events: list[str]) -> list[str]:
    """Without the moment at which the end was told, which each process knows to the second."""
    return [event.partition('"completed_at"')[0] for event in events]


def test_the_same_post_goes_on_elsewhere(http: httpx.Client, other: httpx.Client, leader: ScriptedLeader) -> None:
    """In mid-answer the POST is sent again with Last-Event-ID; one request is made, and one response stored."""
    leader.pause()
    body = RESPONSE | {"on_disconnect": "continue"}
    with http.stream("POST", "/v1/responses", json=body) as response:
        rid = response.headers["x-request-id"]
        leader.step(5)
        lines, seen = response.iter_lines(), list[str]()
        while sum('"delta":' in line for line in seen) < 5:
            seen.append(next(lines))
    leader.resume()
    last = next(line for line in reversed(seen) if line.startswith("id: ")).removeprefix("id: ")
    again = other.post("/v1/responses", json=body, headers={"last-event-id": last})
    deltas = [msgspec.json.decode(line[6:]) for line in [*seen, *again.text.splitlines()] if '"delta":' in line]
    assert "".join(event["delta"] for event in deltas) == SAID
    numbers = [event["sequence_number"] for event in deltas]
    assert numbers == list(range(numbers[0], numbers[0] + len(SAID)))
    assert len(leader.claimed) == 1
    stored = other.get(f"/v1/responses/resp_{rid}").json()
    assert stored["status"] == "completed" and stored["output"][0]["content"][0]["text"] == SAID


def test_under_the_transport_that_resumes(doomed: ApiProcess, api: ApiProcess, leader: ScriptedLeader) -> None:
    """kill -9 in mid-answer: the official client's own streaming helper goes on and notices nothing."""
    leader.pause()
    leader.step(4)
    transport = ResumingTransport([api.url])
    with (
        openai.OpenAI(
            base_url=f"{doomed.url}/v1",
            api_key="secret",
            max_retries=0,
            http_client=httpx.Client(transport=transport, timeout=40),
        ) as client,
        client.responses.stream(model="tiny", input="hello") as stream,
    ):
        for event in stream:
            if event.type == "response.output_text.delta" and doomed.process.poll() is None:
                leader.step(2)
                if len(event.snapshot) >= 6:
                    doomed.process.kill()
                    doomed.process.wait()
                    leader.resume()
        assert stream.get_final_response().output_text == SAID
    assert len(leader.claimed) == 1


def test_what_a_dead_process_had_in_the_background(
    doomed: ApiProcess, other: httpx.Client, leader: ScriptedLeader, redis_client: Any
) -> None:
    """Another process takes it up, follows it, and stores it once it has ended."""
    leader.pause()
    leader.step(3)
    body = {"model": "tiny", "input": "hello", "background": True}
    identity = httpx.post(f"{doomed.url}/v1/responses", json=body).json()["id"]
    rid = identity.removeprefix("resp_")
    request = keys.ModelKeys("tiny").request(rid)
    until(lambda: redis_client.hget(request, "followers"))
    doomed.process.kill()
    doomed.process.wait()
    redis_client.hset(request, "followers", "")  # as the reaper does after its grace
    redis_client.zadd(keys.OPEN_RESPONSES, {f"{rid} {KEYLESS}": 1})  # as if its time to be looked after had come
    until(lambda: redis_client.hget(request, "followers"))
    leader.resume()
    until(lambda: redis_client.hget(RECORDS.record(rid), "response"))
    stored = other.get(f"/v1/responses/{identity}").json()
    assert (stored["status"], stored["output"][0]["content"][0]["text"]) == ("completed", SAID)


def test_what_ended_with_nobody_looking(
    doomed: ApiProcess, other: httpx.Client, leader: ScriptedLeader, redis_client: Any
) -> None:
    """Its log is turned into the response by a look, and by whoever asks before that."""
    leader.pause()
    body = {"model": "tiny", "input": "hello", "background": True}
    rids = [httpx.post(f"{doomed.url}/v1/responses", json=body).json()["id"][5:] for _ in range(2)]
    until(lambda: len(leader.claimed) == 2)
    doomed.process.kill()
    doomed.process.wait()
    leader.resume()
    for rid in rids:
        until(lambda rid=rid: redis_client.hget(keys.ModelKeys("tiny").request(rid), "state") == "finished")
        assert redis_client.hget(RECORDS.record(rid), "response") is None
    answer_body = other.get(f"/v1/responses/resp_{rids[0]}").json()
    assert (answer_body["status"], answer_body["output"][0]["content"][0]["text"]) == ("completed", SAID)
    redis_client.zadd(keys.OPEN_RESPONSES, {f"{rids[1]} {KEYLESS}": 1})
    until(lambda: redis_client.hget(RECORDS.record(rids[1]), "response"))
    until(lambda: redis_client.zscore(keys.OPEN_RESPONSES, f"{rids[1]} {KEYLESS}") is None)


def test_a_process_that_stores_nothing(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    """With `--response-ttl 0` responses are answered and forgotten, and what needs storing is refused."""
    with (
        running_api(server.url, tmp_path, "--response-ttl", "0") as process,
        httpx.Client(base_url=process.url) as client,
    ):
        response = client.post("/v1/responses", json={"model": "tiny", "input": "hello"}).json()
        assert (response["status"], response["store"]) == ("completed", False)
        assert client.get(f"/v1/responses/{response['id']}").status_code == 404
        refused = client.post("/v1/responses", json={"model": "tiny", "input": "hello", "background": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "background")


def test_what_is_lost_says_so(http: httpx.Client, leader: ScriptedLeader, redis_client: Any) -> None:
    """With the request gone and no end stored, the response has failed, and is no endless wait."""
    leader.pause()
    identity = http.post("/v1/responses", json={"model": "tiny", "input": "x", "background": True}).json()["id"]
    rid = identity.removeprefix("resp_")
    until(lambda: leader.claimed)
    view = redis_client.hget(RECORDS.record(rid), "view")
    http.post(f"/v1/requests/{rid}/cancel")
    until(lambda: redis_client.hget(RECORDS.record(rid), "response"))
    redis_client.hdel(RECORDS.record(rid), "response")
    redis_client.hset(RECORDS.record(rid), "view", view)
    redis_client.delete(keys.ModelKeys("tiny").request(rid))
    lost = http.get(f"/v1/responses/{identity}").json()
    assert lost["status"] == "failed" and "lost" in lost["error"]["message"]
