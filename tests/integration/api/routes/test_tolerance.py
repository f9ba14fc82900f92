"""Unknown fields over HTTP: a Warning header on whole answers and streams, a log line, and a 400 with --strict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server

HEADER = '299 furrow "Unknown fields were ignored: colour."'
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("x"),
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/messages": SAID,
    "/v1/messages/count_tokens": {"messages": SAID["messages"]},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [65]},
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", BODIES)
def test_an_unknown_field_is_ignored_with_a_warning(
    http: httpx.Client, api: ApiProcess, leader: ScriptedLeader, path: str
) -> None:
    """Every API takes the request, names the field in a header and in one log line; without the field there is none."""
    response = http.post(path, json=BODIES[path] | {"colour": "red"})
    assert (response.status_code, response.headers.get("warning")) == (200, HEADER), response.text
    lines = [line for line in api.lines if line.get("action") == "request_warned" and line["path"] == path]
    assert [line["warnings"] for line in lines] == [["Unknown fields were ignored: colour."]]
    assert "warning" not in http.post(path, json=BODIES[path]).headers


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_has_the_warning(http: httpx.Client, leader: ScriptedLeader, path: str) -> None:
    """So has a stream, one that is joined by its Idempotency-Key, and one that is resumed with the same body."""
    body, key = BODIES[path] | {"colour": "red", "stream": True}, {"idempotency-key": f"warned{path}"}
    first = http.post(path, json=body, headers=key)
    joined = http.post(path, json=body, headers=key)
    assert first.text.splitlines()[0].startswith("id: "), first.text
    resumed = http.post(path, json=body, headers={"last-event-id": first.text.splitlines()[0].removeprefix("id: ")})
    assert [each.headers.get("warning") for each in (first, joined, resumed)] == [HEADER] * 3


def test_a_refusal_has_the_warning_too(http: httpx.Client, leader: ScriptedLeader) -> None:
    """A name that was misspelt is often the reason for another error."""
    response = http.post("/v1/chat/completions", json=chat("x" * 10_000) | {"truncaton": "auto"})
    assert (response.status_code, "truncaton" in response.headers["warning"]) == (400, True)


def test_strict_refuses_an_unknown_field(server: Server, leader: ScriptedLeader, tmp_path: Path) -> None:
    """`--strict` answers 400 by name on every route; fields inside messages are ignored all the same."""
    with (
        running_api(server.url, tmp_path, "--strict") as strict,
        httpx.Client(base_url=strict.url, timeout=40) as http,
    ):
        for path, body in BODIES.items():
            response = http.post(path, json=body | {"colour": "red"})
            assert response.status_code == 400 and "colour" in response.json()["error"]["message"], path
        echoed = {"role": "user", "content": "x", "reasoning_details": []}
        assert http.post("/v1/chat/completions", json={"messages": [echoed]}).status_code == 200
