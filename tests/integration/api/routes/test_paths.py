"""Paths with and without /v1: the neighbours' small routes, and errors in the dialect of the request."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from control.operations.checks.findings import Checks
from control.version import VERSION
from ops.cli.doctor.api_server import ApiServer, check_stream
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

HELLO = [{"role": "user", "content": "x"}]
ANTHROPIC = {"anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/chat/completions", chat("x")),
        ("POST", "/chat/completions/input_tokens", chat("x")),
        ("POST", "/completions", {"prompt": "x"}),
        ("POST", "/responses", {"input": "x"}),
        ("POST", "/responses/input_tokens", {"input": "x"}),
        ("POST", "/messages", {"messages": HELLO, "max_tokens": 5}),
        ("POST", "/messages/count_tokens", {"messages": HELLO}),
        ("POST", "/tokenize", {"prompt": "x"}),
        ("POST", "/detokenize", {"tokens": [65]}),
        ("GET", "/tokenizer_info", None),
        ("GET", "/models", None),
        ("GET", "/models/tiny", None),
        ("GET", "/health", None),
        ("GET", "/ready", None),
        ("GET", "/metrics", None),
        ("GET", "/ping", None),
        ("GET", "/version", None),
        ("GET", "/load", None),
        ("HEAD", "/models", None),
    ],
)
def test_a_path_with_and_without_its_prefix(
    http: httpx.Client, leader: ScriptedLeader, method: str, path: str, body: Any
) -> None:
    """Both are the same route; so is a prefix that comes twice, from a base URL and from the client."""
    for prefix in ("", "/v1", "/v1/v1"):
        response = http.request(method, prefix + path, json=body)
        assert response.status_code == 200, (prefix, response.text)


def test_a_stream_without_the_prefix_is_followed_and_cancelled(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Streams, their events, their state and their cancellation, by paths without /v1."""
    response = http.post("/chat/completions", json=chat("x", stream=True))
    rid = response.headers["x-request-id"]
    assert http.get(f"/requests/{rid}").json()["id"] == rid
    assert "data: [DONE]" in http.get(f"/requests/{rid}/events").text
    assert http.post(f"/requests/{rid}/cancel").status_code == 200


def test_a_stream_that_no_model_makes(api: ApiProcess) -> None:
    """`furrow doctor --url` times it: its events come one by one, with the headers of an answer's stream."""
    checks = Checks("api")
    check_stream(ApiServer(urlsplit(api.url), ssl.create_default_context()), checks)
    assert [one.level for one in checks.findings] == ["ok"]
    with httpx.stream("GET", f"{api.url}/v1/health/stream") as answer:
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["content-type"].startswith("text/event-stream")


def test_the_routes_of_neighbours(http: httpx.Client, leader: ScriptedLeader) -> None:
    """`/ping` as SageMaker asks, `/version` and `/load` as vLLM answers."""
    assert http.get("/ping").status_code == 200
    assert http.get("/version").json() == {"version": VERSION}
    until(lambda: http.get("/load").json() == {"server_load": 0}, 20)
    leader.pause()
    with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}):
        assert http.get("/load").json() == {"server_load": 1}
        leader.resume()


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/models/nobody", 404, "not_found_error"),
        ("GET", "/models/nobody", 404, "not_found_error"),
        ("GET", "/nowhere", 404, "not_found_error"),
        ("DELETE", "/v1/models", 405, "invalid_request_error"),
        ("GET", "/v1/requests/nobody", 404, "not_found_error"),
        ("POST", "/tokenize", 400, "invalid_request_error"),
    ],
)
def test_errors_of_shared_routes_have_the_dialect_of_the_request(
    http: httpx.Client, leader: ScriptedLeader, method: str, path: str, status: int, kind: str
) -> None:
    """Anthropic's form where its header was sent, OpenAI's else; the Messages API has its form always."""
    ours = http.request(method, path)
    theirs = http.request(method, path, headers=ANTHROPIC)
    assert (ours.status_code, theirs.status_code) == (status, status)
    assert set(ours.json()) == {"error"} and set(ours.json()["error"]) == {"message", "type", "param", "code"}
    assert (theirs.json()["type"], theirs.json()["error"]["type"]) == ("error", kind)
    assert theirs.headers["request-id"] == theirs.json()["request_id"] != ""
    assert "request-id" not in ours.headers


@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "/v1/v1/messages", "/messages/count_tokens"])
def test_the_messages_api_has_its_form_on_every_path(http: httpx.Client, path: str) -> None:
    """Without the header too, for errors of the body and of the method."""
    for response in (http.post(path, json={}), http.get(path)):
        assert response.status_code in (400, 405) and response.json()["type"] == "error", response.text


def test_refusals_before_and_without_a_handler(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    """401 without a key, 413 for a body, 431 for a head: each in the dialect of its request."""
    with running_api(server.url, tmp_path, "--api-key", "secret", "--max-body", "1") as api:
        key = {"authorization": "Bearer secret"}
        for headers, member in ((ANTHROPIC, "type"), ({}, "error")):
            refused = httpx.get(f"{api.url}/v1/models", headers=headers)
            assert (refused.status_code, next(iter(refused.json()))) == (401, member)
            large = httpx.post(f"{api.url}/tokenize", content=b" " * 2_000_000, headers=headers | key)
            assert (large.status_code, next(iter(large.json()))) == (413, member)
        assert b'"type":"error"' in raw(api, b"anthropic-version: 2023-06-01\r\n")
        assert b'"type":"error"' not in raw(api, b"")


def raw(api: ApiProcess, headers: bytes) -> bytes:
    """The answer to a head that is too large, as it came."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=20) as client:
        client.sendall(b"GET /v1/models HTTP/1.1\r\n" + headers + b"a: b\r\n" * 1000)
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 431")
    return answer
