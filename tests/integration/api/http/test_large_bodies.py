"""Bodies of any size are answered or refused: in their route's dialect, and no stream waits for them."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.integration.api.conftest import ApiProcess
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.waiting import until

MIB = 1 << 20
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


def code_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    return error.get("code") or error["type"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", MESSAGES, "/tokenize", "/farm/models/load"])
@pytest.mark.parametrize("told", [True, False], ids=["length", "chunked"])
def test_a_body_beyond_its_route(http: httpx.Client, leader: ScriptedLeader, path: str, told: bool) -> None:
    """413 names the limit, whether the length is told or not; the connection is fit for the next request."""
    body = b'{"x":"' + b"a" * (5 * MIB if "farm" not in path else 100_000) + b'"}'
    content: Any = body if told else (body[i : i + 65536] for i in range(0, len(body), 65536))
    refused = http.post(path, content=content, headers={"content-type": "application/json"})
    assert refused.status_code == 413, refused.text
    assert code_of(refused) == "request_too_large"
    assert ("64 KiB" if "farm" in path else "4 MiB") in refused.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def units(limit: int = 3 * MIB) -> Iterator[tuple[str, str, bytes]]:
    """Bodies that cost most: name, path, body."""

    def filled(unit: bytes, before: bytes, after: bytes) -> bytes:
        return before + unit * (limit // len(unit)) + unit.rstrip(b",") + after

    yield "nested arrays", "/v1/completions", filled(b"[1],", b'{"prompt":[', b"]}")
    yield "token ids", "/v1/completions", filled(b"1,", b'{"prompt":[', b"]}")
    yield "messages", CHAT, filled(b'{"role":"user","content":"x"},', b'{"messages":[', b"]}")
    yield "parts", CHAT, filled(b'{"type":"text","text":""},', b'{"messages":[{"role":"user","content":[', b"]}]}")
    yield "schema", CHAT, filled(b'"x":{},', b'{"messages":[],"response_format":{', b"}}")
    yield "stop strings", CHAT, filled(b'"x",', b'{"messages":[],"stop":[', b"]}")
    yield "biases", CHAT, filled(b'"1":1,', b'{"messages":[],"logit_bias":{', b"}}")
    yield "metadata", CHAT, filled(b'"a":"",', b'{"messages":[],"metadata":{', b"}}")
    yield "a long name", CHAT, b'{"' + b"a" * limit + b'":1}'
    yield "half characters", CHAT, b'{"user":"' + rb"\ud83d\ude00" * (limit // 12) + b'\\ud800"}'
    yield "deep", CHAT, b'{"response_format":' + b"[" * limit
    yield (
        "deep tools",
        CHAT,
        b'{"messages":[],"tools":[{"type":"function","function":{"name":"f","parameters":'
        + (b'{"a":' * 400 + b"1" + b"}" * 400 + b"}}]}"),
    )
    yield "items", "/v1/responses", filled(b'{"role":"user","content":"x"},', b'{"input":[', b"]}")
    yield (
        "blocks",
        MESSAGES,
        filled(b'{"type":"text","text":"x"},', b'{"max_tokens":1,"messages":[{"role":"user","content":[', b"]}]}"),
    )
    yield "ids", "/detokenize", filled(b"1,", b'{"tokens":[', b"]}")
    yield "a text", "/tokenize", b'{"prompt":"' + b"a b " * (limit // 4) + b'"}'


BODIES = list(units())


@pytest.mark.parametrize(("path", "body"), [one[1:] for one in BODIES], ids=[one[0] for one in BODIES])
def test_a_body_that_costs_much_is_refused(http: httpx.Client, leader: ScriptedLeader, path: str, body: bytes) -> None:
    """By a short message, never by a failure of the server."""
    refused = http.post(path, content=body, headers={"content-type": "application/json"})
    assert 400 <= refused.status_code < 500, refused.text[:300]
    assert len(refused.content) < 5000


def test_stalled_bodies_leave_room_for_others(api: ApiProcess, http: httpx.Client, leader: ScriptedLeader) -> None:
    """Uploads that fill the memory and stop keep nobody out."""
    held = []
    for _ in range(8):
        stalled = socket.create_connection(("127.0.0.1", api.port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {4 * MIB}\r\n\r\n"
        stalled.sendall(head.encode() + b"x" * (4 * MIB - 10))
        held.append(stalled)
    large = chat("x" * 100_000)  # beyond the context: a 400 says that it was read
    until(lambda: http.post(CHAT, json=large).status_code in (200, 400), 5.0)  # 429 until they wait
    assert http.post(CHAT, json=chat("x")).status_code == 200
    refused = [stalled for stalled in held if answered(stalled)]
    assert refused
    for stalled in held:
        stalled.close()


def answered(stalled: socket.socket) -> bool:
    stalled.settimeout(0.2)
    try:
        return stalled.recv(100).startswith(b"HTTP/1.1 429 ")
    except TimeoutError:
        return False


@pytest.mark.parametrize(
    ("path", "action"),
    [
        *((path, "request_ended") for path in (CHAT, "/v1/responses", f"{MESSAGES}/count_tokens")),
        *((path, "client_left") for path in ("/tokenize", "/farm/models/load")),
    ],
)
def test_a_client_that_leaves_its_upload(api: ApiProcess, leader: ScriptedLeader, path: str, action: str) -> None:
    """One quiet line in the log, and no failure of the server."""

    def lines() -> list[dict[str, Any]]:
        matching_lines = [line for line in api.lines if line.get("path") == path]  # those of other tests may still come
        return [
            line
            for line in matching_lines
            if line["action"] == "client_left" or line.get("client_request_id") == "leaving"
        ]

    before = len(lines())
    with socket.create_connection(("127.0.0.1", api.port)) as leaving:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nx-request-id: leaving\r\ncontent-length: 1000\r\n\r\n"
        leaving.sendall(head.encode() + b"{")
        time.sleep(0.05)  # the handler reads by now; where it does not yet, it finds the same
    until(lambda: len(lines()) > before)
    [line] = lines()[before:]
    assert (line["action"], line["level"]) == (action, "info"), line
    assert action == "client_left" or (line["status"], line["error"]) == (499, "client disconnected")


def test_streams_go_on_beside_them(http: httpx.Client, api: ApiProcess, leader: ScriptedLeader) -> None:
    """The event loop answers meanwhile; one such body stopped it for seconds."""
    done, pauses = threading.Event(), list[float]()

    def look() -> None:
        with httpx.Client(base_url=api.url) as client:
            while not done.is_set():
                began = time.monotonic()
                assert client.get("/health").status_code == 200
                pauses.append(time.monotonic() - began)

    looking = threading.Thread(target=look)
    looking.start()
    for _, path, body in itertools.chain(BODIES, BODIES):
        http.post(path, content=body, headers={"content-type": "application/json"})
    done.set()
    looking.join()
    pauses.sort()
    assert pauses[-1] < 1.5, json.dumps(pauses[-5:])
