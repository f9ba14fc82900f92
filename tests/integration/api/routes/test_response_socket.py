"""The WebSocket of /v1/responses: events as messages, one response after the other, under the rules of all requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from control import access
from control.keys import ModelKeys
from control.redis.clients import SyncRedis
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.routes.conftest import make
from tests.integration.api.socket_client import ACCEPT, CLOSE, PING, PONG, SocketClient, frame
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def test_responses_follow_each_other(api: ApiProcess, http: httpx.Client, leader: ScriptedLeader) -> None:
    """The events are those of the stream by HTTP; the conversation goes on by the response's id."""
    with SocketClient(api.url) as socket:
        assert socket.status == 101 and f"sec-websocket-accept: {ACCEPT}" in socket.head
        events = socket.response(model="tiny", input="one")
        assert text_of(events) == "you said one"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        first = events[-1]["response"]
        assert first["status"] == "completed" and first["store"]
        assert http.get(f"/v1/responses/{first['id']}").json()["id"] == first["id"]
        events = socket.response(model="tiny", input="two", previous_response_id=first["id"])
        assert text_of(events) == "you said two" and "user: one" in leader.prompt()


def test_a_response_that_is_not_stored_goes_on_on_its_connection(api: ApiProcess, leader: ScriptedLeader) -> None:
    """The connection has the last one's items; another connection, and an older response, are not found."""
    with SocketClient(api.url) as socket, SocketClient(api.url) as other:
        first = socket.response(input="one", store=False)[-1]["response"]
        second = socket.response(input="two", store=False, previous_response_id=first["id"])[-1]["response"]
        assert second["status"] == "completed"
        socket.response(input=[{"role": "user", "content": "three"}], store=False, previous_response_id=second["id"])
        prompt = leader.prompt()
        assert [prompt.index(f"user: {word}") for word in ("one", "two", "three")] == sorted(
            prompt.index(f"user: {word}") for word in ("one", "two", "three")
        )
        assert "you said one" in prompt and "you said two" in prompt
        for at, rid in ((other, second["id"]), (socket, first["id"])):
            [refused] = at.response(input="x", previous_response_id=rid)
            assert refused["type"] == "error" and refused["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("message", "status", "param"),
    [
        ({"type": "response.steer"}, 400, "type"),
        ({"type": "response.create", "input": "x", "temperature": 6}, 400, "temperature"),
        ({"type": "response.create", "input": "x", "background": True}, 400, "background"),
        ({"type": "response.create", "input": "x", "generate": False}, 400, "generate"),
        ({"type": "response.create", "input": "x", "model": "none"}, 404, "model"),
        ({"type": "response.create"}, 400, "input"),
    ],
)
def test_a_refusal_is_a_message(
    api: ApiProcess, leader: ScriptedLeader, message: dict[str, Any], status: int, param: str
) -> None:
    """With the status and the error that HTTP has; the connection goes on."""
    with SocketClient(api.url) as socket:
        socket.send(**message)
        refused = socket.event()
        assert (refused["type"], refused["status"], refused["error"]["param"]) == ("error", status, param)
        socket.socket.sendall(frame(b"[1]"))
        assert socket.event()["error"]["code"] == "invalid_json"
        assert text_of(socket.response(input="x")) == "you said x"


def test_a_client_that_leaves_ends_its_response(
    api: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """As a client that leaves a stream by HTTP."""
    leader.pause()
    with SocketClient(api.url) as socket:
        socket.send(type="response.create", input="x")
        until(lambda: leader.claimed, 40)
        assert socket.event()["type"] == "response.created"
        rid = leader.claimed[-1].rid
    leader.resume()
    key = ModelKeys("tiny").request(rid)
    until(lambda: redis_client.hget(key, "state") == "cancelled", 40)


def test_messages_that_break_the_protocol_close_it(api: ApiProcess, leader: ScriptedLeader) -> None:
    """With the code that says why; a fragmented message, pings and a goodbye are answered."""
    large = (1 << 30).to_bytes(8)
    cases = [
        (frame(b"{}", masked=False), 1002),
        (frame(b"\xff"), 1007),
        (frame(b"{}", opcode=2), 1003),
        (frame(b"{}", opcode=3), 1002),
        (frame(b"{}", opcode=0), 1002),
        (frame(b"x" * 126, opcode=PING), 1002),
        (bytes([0xC1, 0x80]) + b"mask", 1002),
        (bytes([0x81, 0xFF]) + large + b"mask", 1009),
        (frame((4321).to_bytes(2), opcode=CLOSE), 4321),
    ]
    for data, code in cases:
        with SocketClient(api.url) as socket:
            socket.socket.sendall(data)
            assert socket.closed() == code, data[:20]
    with SocketClient(api.url) as socket:
        socket.socket.sendall(frame(b"hi", opcode=PING))
        assert socket.frame() == (PONG, b"hi")
        whole = b'{"type": "response.create", "input": "abc"}'
        data = frame(whole[:10], final=False) + frame(b"", opcode=PING) + frame(whole[10:], opcode=0)
        for place in range(len(data)):
            socket.socket.sendall(data[place : place + 1])
        assert socket.frame() == (PONG, b"")
        events = [socket.event()]
        while events[-1]["type"] != "response.completed":
            events.append(socket.event())
        assert text_of(events) == "you said abc"


def test_a_handshake_is_refused_as_a_request(
    api: ApiProcess, guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """Without a key, by a foreign page, in another version, and where there is no WebSocket."""
    refused: list[tuple[str, dict[str, str], int]] = [
        (guarded.url, {}, 401),
        (guarded.url, {"authorization": "Bearer wrong"}, 401),
        (api.url, {"origin": "https://elsewhere.example"}, 403),
        (api.url, {"host": "elsewhere.example"}, 403),
        (api.url, {"sec_websocket_version": "8"}, 400),
        (api.url, {"sec_websocket_key": "short"}, 400),
        (api.url, {"path": "/v1/messages"}, 405),
        (api.url, {"upgrade": "h2c"}, 405),
    ]
    for url, headers, status in refused:
        with SocketClient(url, headers.pop("path", "/v1/responses"), **headers) as socket:
            assert socket.status == status, headers
    secret = make(redis_client, models=["other"])
    with SocketClient(guarded.url, "/responses", authorization=f"Bearer {secret}") as socket:
        assert socket.status == 101
        [answer] = socket.response(model="tiny", input="x")
        assert (answer["status"], answer["error"]["code"]) == (404, "model_not_found")


def test_a_key_and_its_limits_hold_for_each_response(
    guarded: ApiProcess, leader: ScriptedLeader, redis_client: SyncRedis
) -> None:
    """A limit of requests is reached on one connection, and a key that ends serves no more."""
    key, secret = access.mint(rpm=1)
    access.create(redis_client, key)
    with SocketClient(guarded.url, authorization=f"Bearer {secret}") as socket:
        assert text_of(socket.response(input="x")) == "you said x"
        [refused] = socket.response(input="x")
        assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
        access.revoke(redis_client, key)
        until(lambda: socket.response(input="x")[0].get("status") == 401, 40)


def test_a_drain_ends_connections_that_wait(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    """At once where nothing runs, else after the response; no new one is taken."""
    with running_api(server.url, tmp_path) as api, SocketClient(api.url) as idle, SocketClient(api.url) as busy:
        leader.pause()
        busy.send(type="response.create", input="x")
        assert busy.event()["type"] == "response.created"
        api.process.terminate()
        assert idle.closed() == 1001
        leader.resume()
        events = [busy.event()]
        while events[-1]["type"] != "response.completed":
            events.append(busy.event())
        assert busy.closed() == 1001
        assert api.process.wait(40) == 0
