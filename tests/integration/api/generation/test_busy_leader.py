"""A stuck leader delays only its own tokens."""

from __future__ import annotations

import httpx

from tests.integration.api.conftest import ApiProcess
from tests.integration.api.sse import chat, read_all, text_of
from tests.leader import ScriptedLeader


def test_models_and_requests_are_told_while_a_leader_is_stuck(api: ApiProcess, leader: ScriptedLeader) -> None:
    """The list of models, the state of a request and refusals need no device."""
    leader.pause()
    url = f"{api.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=chat("x", stream=True), timeout=40) as response:
        rid = response.headers["x-request-id"]
        assert httpx.get(f"{api.url}/v1/models", timeout=40).status_code == 200
        assert httpx.get(f"{api.url}/v1/requests/{rid}", timeout=40).json()["state"] == "running"
        assert httpx.post(url, json=chat("x", n=0), timeout=40).status_code == 400
        leader.resume()
        assert text_of(read_all(response)) == "you said x"
