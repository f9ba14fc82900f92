"""Pages of foreign origins may not call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
from click.testing import CliRunner

from api.__main__ import main
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server

CHAT = "/v1/chat/completions"
FRIEND, STRANGER = "https://friend.example", "https://stranger.example"
ASKING = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def open_api(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiProcess]:
    with running_api(server.url, tmp_path_factory.mktemp("open"), "--cors-origin", FRIEND) as process:
        yield process


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat("x")),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {**chat("x"), "max_tokens": 8}),
        ("/tokenize", {"prompt": "x"}),
    ],
)
def test_a_foreign_page_makes_no_work(http: httpx.Client, leader: ScriptedLeader, path: str, body: Any) -> None:
    """A form's content type needs no question before; a name that was pointed here makes the page one of our own."""
    assert http.post(path, json=body, headers={"origin": str(http.base_url).rstrip("/")}).is_success
    for headers, code in (
        ({"origin": STRANGER, "content-type": "text/plain"}, "foreign_origin"),
        ({"origin": "null", "content-type": "text/plain"}, "foreign_origin"),
        ({"origin": "http://evil.example", "host": "evil.example"}, "foreign_host"),
    ):
        refused = http.post(path, content=msgspec.json.encode(body), headers=headers)
        error = refused.json()["error"]
        assert refused.status_code == 403 and "--cors-origin" in error["message"], refused.text
        assert headers["origin"] in error["message"] or headers["host"] in error["message"]
        assert error["type"] == "permission_error" and error.get("code", code) == code
        assert "access-control-allow-origin" not in refused.headers


def test_nobody_is_let_in_by_default(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Neither the question before nor the answer names an origin."""
    for response in (
        http.options(CHAT, headers={"origin": FRIEND, **ASKING}),
        http.post(CHAT, json=chat("x"), headers={"origin": FRIEND}),
    ):
        assert "access-control-allow-origin" not in response.headers


def test_a_page_of_a_named_origin_may_call(open_api: ApiProcess, leader: ScriptedLeader) -> None:
    """The browser's question, a whole answer, a stream and a refusal all say so, without credentials."""
    with httpx.Client(base_url=open_api.url, timeout=40, headers={"origin": FRIEND}) as http:
        asked = http.options(CHAT, headers=ASKING)
        answers = [
            asked,
            http.post(CHAT, json=chat("x")),
            http.post(CHAT, json=chat("x", stream=True)),
            http.post(CHAT, json=chat("x", n=0)),
        ]
    assert [response.headers.get("access-control-allow-origin") for response in answers] == [FRIEND] * 4
    assert all("access-control-allow-credentials" not in response.headers for response in answers)
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert "data: [DONE]" in answers[2].text


def test_a_page_of_another_origin_may_not(open_api: ApiProcess, leader: ScriptedLeader) -> None:
    """The browser is not told that it may read the answer."""
    response = httpx.options(f"{open_api.url}{CHAT}", headers={"origin": STRANGER, **ASKING})
    assert response.headers.get("access-control-allow-origin") != STRANGER
    assert response.headers.get("access-control-allow-origin") != "*"


@pytest.mark.parametrize("origin", ["friend.example", "https://friend.example/", "https://*.example"])
def test_an_origin_that_no_browser_sends_is_refused_at_the_start(origin: str) -> None:
    """The message names it and how it is written."""
    result = CliRunner().invoke(main, ["--cors-origin", origin])
    assert result.exit_code == 2
    assert origin in result.output
