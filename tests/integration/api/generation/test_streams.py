"""Streams are resumed by event id: on another process, too; comments, failures, and the clients that leave."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from control.keys import ModelKeys
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import Event, chat, events, read_all, text_of
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def other_api(server: Server, api: ApiProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with running_api(server.url, tmp_path_factory.mktemp("other")) as process:
        yield process


@pytest.fixture
def other(other_api: ApiProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=other_api.url, timeout=40) as client:
        yield client


def full_stream(http: httpx.Client, **fields: Any) -> list[Event]:
    with http.stream("POST", CHAT, json=chat("hello", stream=True, **fields)) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return read_all(response)


def test_event_ids_only_grow(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Every event has an id `<rid>:<seq>.<part>` that only grows, and [DONE] ends the stream."""
    events = full_stream(http)
    rid = events[0].data["id"].removeprefix("chatcmpl-")
    places = []
    for event in events:
        assert event.id is not None and event.id.startswith(f"{rid}:")
        seq, part = event.id.removeprefix(f"{rid}:").split(".")
        places.append((int(seq), int(part)))
    assert places == sorted(set(places))
    assert events[-1].done and not any(event.done for event in events[:-1])


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": ["said hel"]}, {"logprobs": True, "top_logprobs": 1}])
def test_resume_at_every_place(
    http: httpx.Client, other: httpx.Client, leader: ScriptedLeader, fields: dict[str, Any]
) -> None:
    """From any event on, another process sends exactly the rest: nothing lost, nothing twice."""
    options = {"stream_options": {"include_usage": True}}
    whole = full_stream(http, **fields, **options)
    rid = whole[0].data["id"].removeprefix("chatcmpl-")
    for place, event in enumerate(whole):
        response = other.get(f"/v1/requests/{rid}/events", headers={"last-event-id": str(event.id)})
        assert _merged(whole[: place + 1] + read_all(response)) == _merged(whole), event.id


def _merged(event_list: list[Event]) -> list[Any]:
    """The events as a client reads them, however tokens were joined: text per choice, ends, usage."""
    texts: dict[int, str] = {}
    scored: list[Any] = []
    rest = []
    for event in event_list:
        if event.data is None:
            continue
        for choice in event.data["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
            scored += (choice["logprobs"] or {}).get("content", [])
            if choice["finish_reason"] or "role" in choice["delta"]:
                rest.append((choice["index"], choice["finish_reason"]))
        if event.data.get("usage"):
            rest.append(event.data["usage"])
    return [texts, sorted(map(repr, scored)), rest]


def test_resume_in_the_middle_by_the_same_post(http: httpx.Client, other: httpx.Client, leader: ScriptedLeader) -> None:
    """The POST is sent again with Last-Event-ID to another process while the answer is still being made."""
    leader.pause()
    body = chat("a long story", stream=True, on_disconnect="continue")
    with http.stream("POST", CHAT, json=body) as response:
        leader.step(5)
        events_read = events(response.iter_lines())
        before = []
        while len(text_of(before)) < 5:
            before.append(next(event for event in events_read if not event.comment))
    leader.resume()
    again = other.post(CHAT, json=body, headers={"last-event-id": str(before[-1].id)})
    after = read_all(again)
    assert text_of(before) + text_of(after) == "you said a long story"
    assert after[-1].done
    assert len(leader.claimed) == 1


def test_resume_is_for_the_same_tenant(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Another tenant's key sees neither the stream nor that there is one."""
    with http.stream("POST", CHAT, json=chat("x", stream=True), headers={"authorization": "Bearer one"}) as response:
        rid = response.headers["x-request-id"]
        read_all(response)
    for path in (f"/v1/requests/{rid}", f"/v1/requests/{rid}/events"):
        assert http.get(path, headers={"authorization": "Bearer one"}).status_code == 200
        stranger = http.get(path, headers={"authorization": "Bearer two"})
        assert (stranger.status_code, stranger.json()["error"]["code"]) == (404, "request_not_found")


def test_a_bad_event_id(http: httpx.Client, leader: ScriptedLeader) -> None:
    """A Last-Event-ID that no stream sent is a 400; a request that is not there is a 404 for who had nothing of it."""
    body = chat("x", stream=True)
    assert http.post(CHAT, json=body, headers={"last-event-id": "banana"}).status_code == 400
    assert http.get("/v1/requests/0123/events").status_code == 404


def test_a_key_joins_its_request_and_refuses_another_body(http: httpx.Client, leader: ScriptedLeader) -> None:
    """The same key with the same body joins the job, with another body it is a conflict."""
    headers = {"idempotency-key": "once"}
    first = http.post(CHAT, json=chat("x"), headers=headers)
    second = http.post(CHAT, json=chat("x"), headers=headers)
    assert first.json() == second.json()
    assert len(leader.claimed) == 1
    conflict = http.post(CHAT, json=chat("y"), headers=headers)
    assert (conflict.status_code, conflict.json()["error"]["code"]) == (409, "idempotency_conflict")
    elsewhere = http.post(CHAT, json=chat("y"), headers=headers | {"authorization": "Bearer other"})
    assert elsewhere.status_code == 200


def test_idempotency_of_a_list_of_prompts(http: httpx.Client, leader: ScriptedLeader) -> None:
    """All requests of a list are joined, under the id of the first."""
    body = {"model": "tiny", "prompt": ["ab", "cd"]}
    headers = {"idempotency-key": "list"}
    first = http.post("/v1/completions", json=body, headers=headers)
    second = http.post("/v1/completions", json=body, headers=headers)
    assert first.json() == second.json()
    assert len(leader.claimed) == 2


def test_a_client_that_leaves_cancels_unless_it_asked_to_continue(
    http: httpx.Client, leader: ScriptedLeader, redis_client: Any, api: ApiProcess
) -> None:
    """A client that leaves ends its request, unless it asked for it to go on."""
    leader.pause()
    for policy, state in (("cancel", "cancelled"), ("continue", "finished")):
        with http.stream("POST", CHAT, json=chat("x", stream=True, on_disconnect=policy)) as response:
            rid = response.headers["x-request-id"]
            leader.step()
            assert next(event for event in events(response.iter_lines()) if event.text)
        if policy == "continue":
            until(lambda rid=rid: api.ended(rid))
            leader.resume()
        hash_key = ModelKeys("tiny").request(rid)
        until(lambda key=hash_key, state=state: redis_client.hget(key, "state") == state)
        line = until(lambda rid=rid: api.ended(rid))
        assert len(line) == 1
        assert (line[0]["status"], line[0]["error"]) == (499, "client disconnected")


def test_leaving_for_a_while(http: httpx.Client, leader: ScriptedLeader, redis_client: Any) -> None:
    """With a number of seconds the request goes on that long for the client to come back, and then ends."""
    leader.pause()
    with http.stream("POST", CHAT, json=chat("x", stream=True, on_disconnect=1)) as response:
        rid = response.headers["x-request-id"]
        leader.step()
        assert next(event for event in events(response.iter_lines()) if event.text)
    key = ModelKeys("tiny").request(rid)
    until(lambda: redis_client.hget(key, "orphan_at"))
    assert redis_client.hget(key, "state") == "running"
    until(lambda: redis_client.hget(key, "state") == "cancelled")


def test_leaving_a_body_that_is_not_streamed(
    http: httpx.Client, leader: ScriptedLeader, redis_client: Any, api: ApiProcess
) -> None:
    """The handler of a plain request notices too."""
    leader.pause()
    with pytest.raises(httpx.ReadTimeout):
        http.post(CHAT, json=chat("x"), timeout=0.3)
    rid = until(lambda: leader.claimed)[0].rid
    until(lambda: redis_client.hget(ModelKeys("tiny").request(rid), "state") == "cancelled")
    assert until(lambda: api.ended(rid))[0]["status"] == 499


def test_cancel_by_another_connection(http: httpx.Client, leader: ScriptedLeader, api: ApiProcess) -> None:
    """DELETE ends a running stream with an error event and [DONE], and says the state."""
    leader.pause()
    with http.stream("POST", CHAT, json=chat("x", stream=True)) as response:
        rid = response.headers["x-request-id"]
        leader.step()
        events_read = events(response.iter_lines())
        assert next(event for event in events_read if event.text)
        assert httpx.delete(f"{api.url}/v1/requests/{rid}").json()["state"] in ("running", "cancelled")
        rest = list(events_read)
    assert rest[-2].data["error"]["code"] == "request_cancelled"
    assert rest[-1].done
    status = http.get(f"/v1/requests/{rid}").json()
    assert (status["state"], status["completion_tokens"]) == ("cancelled", 1)
    assert status["times_ms"]["t_first"] >= status["times_ms"]["t_claimed"] >= status["times_ms"]["t_enqueued"]


def test_a_queued_request_is_cancelled_before_its_headers(
    http: httpx.Client, leader: ScriptedLeader, server: Server, redis_client: Any, api: ApiProcess
) -> None:
    """While the headers wait, an end is still a status, not an event."""
    leader.claiming = False
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{api.url}{CHAT}", json=chat("x", stream=True), timeout=40))
    )
    thread.start()
    key = until(
        lambda: (
            redis_client.keys("furrow:{tiny}:queue:*")
            and [
                key
                for key in redis_client.scan_iter("furrow:{tiny}:req:*")
                if redis_client.hget(key, "state") == "queued"
            ]
        )
    )[0]
    assert http.post(f"/v1/requests/{key.rpartition(':')[2]}/cancel").json()["state"] == "cancelled"
    thread.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (409, "request_cancelled")


def test_a_failure_after_the_first_token(http: httpx.Client, leader: ScriptedLeader, api: ApiProcess) -> None:
    """A late failure is an error event with OpenAI's object, then [DONE]; without a stream it is a status."""
    leader.fail_at = 5
    events = full_stream(http)
    assert events[-2].data["error"]["code"] == "generation_failed"
    assert "not finite" in events[-2].data["error"]["message"]
    assert events[-1].done
    assert text_of(events) == "you s"
    plain = http.post(CHAT, json=chat("x"))
    assert (plain.status_code, plain.json()["error"]["code"]) == (500, "generation_failed")


def test_a_passed_deadline_is_a_503_without_retry(http: httpx.Client, leader: ScriptedLeader) -> None:
    """A request whose time passes while it runs ends as a 503 that SDKs do not retry."""
    leader.pause()
    answer = http.post(CHAT, json=chat("x", timeout=0.2))
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "deadline_exceeded")
    assert (answer.headers["x-should-retry"], "retry-after" in answer.headers) == ("false", False)


def test_a_request_ends_with_exactly_one_log_line(http: httpx.Client, leader: ScriptedLeader, api: ApiProcess) -> None:
    """Exactly one line ends a request, with its counts and times."""
    rid = http.post(CHAT, json=chat("hello")).headers["x-request-id"]
    line, *more = until(lambda: api.ended(rid))
    assert more == []
    assert (line["model"], line["finish_reason"], line["status"], line["error"]) == ("tiny", "stop", 200, None)
    assert line["prompt_tokens"] == len(leader.claimed[0].params.prompt)
    assert line["completion_tokens"] == len("you said hello") + 1
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    refused = http.post(CHAT, json=chat("x", n=0)).headers["x-request-id"]
    (line,) = until(lambda: api.ended(refused))
    assert (line["status"], line["finish_reason"]) == (400, None)


def test_the_last_follower_that_leaves_ends_the_request(
    http: httpx.Client, other: httpx.Client, leader: ScriptedLeader, redis_client: Any
) -> None:
    """All see the same on any process, from the beginning; only when the last one leaves the request ends."""
    leader.pause()
    state = ModelKeys("tiny").request
    with ExitStack() as first, ExitStack() as rest:
        sender = first.enter_context(http.stream("POST", CHAT, json=chat("hello", stream=True)))
        rid = sender.headers["x-request-id"]
        streams = [sender]
        for client in (http, other, other):
            streams.append(rest.enter_context(client.stream("GET", f"/v1/requests/{rid}/events")))
        readers = [events(stream.iter_lines()) for stream in streams]
        leader.step(3)
        assert [text_until(reader, 3) for reader in readers] == ["you"] * 4
        first.close()
        until(lambda: len(redis_client.hget(state(rid), "followers").split()) == 2)
        leader.step(1)
        assert [text_until(reader, 1) for reader in readers[1:]] == [" "] * 3
        assert redis_client.hget(state(rid), "state") == "running"
        rest.close()
    until(lambda: redis_client.hget(state(rid), "state") == "cancelled" or leader.step())


def text_until(reader: Iterator[Event], characters: int) -> str:
    """The next text, at least so much: tokens that are ready come joined."""
    text = ""
    while len(text) < characters:
        text += next(reader).text
    return text
