"""Endpoints that neighbours have and this server has not yet: a clear 404, no half answer."""

from __future__ import annotations

import httpx
import pytest

from tests.leader import ScriptedLeader


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/conversations", "/v1/images/generations"])
def test_an_endpoint_that_is_not_there_says_so(http: httpx.Client, leader: ScriptedLeader, path: str) -> None:
    """OpenAI's error body with a code, which SDKs turn into their own exception; nothing reaches a leader."""
    response = http.post(path, json={"model": "tiny", "input": "x", "messages": [{"role": "user", "content": "x"}]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unknown_url")
    assert leader.claimed == []
