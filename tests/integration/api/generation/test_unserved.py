"""Endpoints that are not served are a clear 404."""

from __future__ import annotations

import httpx
import openai
import pytest

from tests.leader import ScriptedLeader


@pytest.mark.parametrize("path", ["/v1/conversations", "/v1/images/generations", "/v1/audio/speech"])
def test_an_endpoint_that_is_not_there_says_so(http: httpx.Client, leader: ScriptedLeader, path: str) -> None:
    """OpenAI's error body with a code, which SDKs turn into their own exception; nothing reaches a leader."""
    response = http.post(path, json={"model": "tiny", "input": "x", "messages": [{"role": "user", "content": "x"}]})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unknown_url")
    assert leader.claimed == []


def test_a_model_that_generates_text_gives_no_embeddings(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A 400 that names the model, and not a failure that an SDK would try again; an unknown model is a 404."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model="tiny", input="x")
    assert (refused.value.param, refused.value.code) == ("model", "embeddings_not_supported")
    assert "tiny" in refused.value.message
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="nobody", input=["x"])
    assert leader.claimed == []
