"""Requests of a model that is given up or unloaded end."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from control.keys import ModelKeys
from control.requests.upkeep.stranded import abandon
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.waiting import until

WHY = "Model 'tiny' failed to load: replica r0 was given up: Model folder '/models/m' does not exist"
KEYS = ModelKeys("tiny")
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat("x"),
    "/v1/completions": {"model": "tiny", "prompt": "x"},
    "/v1/messages": {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"model": "tiny", "input": "x"},
}


def answers(http: httpx.Client, redis_client: Any, path: str, stream: bool) -> httpx.Response:
    """To a request that is ended while it waits, as the holder of the placement lock ends it."""
    found: list[httpx.Response] = []
    waits = lambda: int(redis_client.hget(KEYS.load, "queued") or 0)  # noqa: E731
    before = waits()
    asking = threading.Thread(target=lambda: found.append(http.post(path, json={**ASKED[path], "stream": stream})))
    asking.start()
    until(lambda: waits() > before)
    assert abandon(redis_client, "tiny", WHY, "finished") == 1
    asking.join(30)
    return found[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ASKED)
def test_a_request_of_a_model_that_is_given_up_is_a_503(
    http: httpx.Client, leader: ScriptedLeader, redis_client: Any, path: str, stream: bool
) -> None:
    """As one that comes later: the code of a model that is not available, the cause, and when to try again."""
    leader.claiming = False
    answer = answers(http, redis_client, path, stream)
    assert answer.status_code == 503
    error = answer.json()["error"]
    assert error["message"] == WHY
    if path == "/v1/messages":
        assert error["type"] == "overloaded_error"
    else:
        assert (error["type"], error["code"]) == ("server_error", "model_unavailable")
    assert answer.headers["retry-after"] == "5" and "x-should-retry" not in answer.headers
