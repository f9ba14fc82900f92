"""Bad input gets OpenAI's error body: the right status, and the name of what was wrong."""

from __future__ import annotations

import codecs
import gzip
import json
from typing import Any

import httpx
import pytest

from tests.byte_model import CONTEXT
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader

CHAT = "/v1/chat/completions"
IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
AUDIO = [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]
FILE = [{"type": "file", "file": {"filename": "x.pdf", "file_data": "AA=="}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": "2"}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"temperature": 5.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"seed": 1.5}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "<|im_end|>", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": IMAGE}]}, "messages[0].content[0].image_url"),
        ({"messages": [{"role": "user", "content": AUDIO}]}, "messages[0].content[0].input_audio"),
        ({"messages": [{"role": "user", "content": FILE}]}, "messages[0].content[0].file"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"max_tokens": 10**23}, "max_tokens"),
        ({"structured_outputs": {"colour": "red"}}, "structured_outputs"),
        ({"mirostat": 2}, "mirostat"),
        ({"best_of": 2}, "best_of"),
        ({"on_disconnect": "explode"}, "on_disconnect"),
        ({"on_disconnect": -1}, "on_disconnect"),
        ({"priority": "urgent"}, "priority"),
        ({"timeout": 0}, "timeout"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata[...]"),
        ({"deadline": 1000.0}, "deadline"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [999999]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": ["x"] * 17}, "dry_sequence_breakers"),
        ({"dry_base": 0.5}, "dry_base"),
        ({"xtc_probability": 1.5}, "xtc_probability"),
        ({"top_n_sigma": -2}, "top_n_sigma"),
        ({"dynatemp_range": 6}, "dynatemp_range"),
    ],
)
def test_a_bad_field_is_named(http: httpx.Client, leader: ScriptedLeader, fields: dict[str, Any], param: str) -> None:
    """Each refusal is a 400 whose `param` is the field at fault, and nothing reaches a leader."""
    response = http.post(CHAT, json=chat("x") | fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert leader.claimed == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [999999]}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt": "x" * 3000, "n": 10, "prompt_logprobs": 10}, "prompt_logprobs"),
        ({"prompt": ["x" * 3000] * 10, "n": 9, "return_token_ids": True}, "return_token_ids"),
        ({"prompt": ["x" * 3000] * 10, "echo": True, "logprobs": 10}, "logprobs"),
        ({"skip_special_tokens": False, "stop": "x"}, "skip_special_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
def test_a_bad_field_of_a_completion(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    """The older endpoint refuses in the same way."""
    response = http.post("/v1/completions", json={"model": "tiny", "prompt": "x"} | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "neutral",
    [
        {"tools": []},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"store": False},
        {"service_tier": "auto"},
        {"reasoning_effort": "none"},
        {"moderation": None},
        {"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit"}},
        {"logprobs": False, "top_logprobs": 0},
        {"stop": None},
        {"n": None},
    ],
)
def test_a_neutral_value_passes(http: httpx.Client, leader: ScriptedLeader, neutral: dict[str, Any]) -> None:
    """Neutral values that SDKs send are accepted."""
    assert http.post(CHAT, json=chat("x") | neutral).status_code == 200


def test_a_bad_idempotency_key(http: httpx.Client) -> None:
    """A key that could not be kept is refused."""
    response = http.post(CHAT, json=chat("x"), headers={"idempotency-key": "a b"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "idempotency-key")


def test_malformed_json_is_a_400(http: httpx.Client) -> None:
    """A body that is no JSON, or none at all, is a 400 that says so."""
    for body in (b'{"model": ', b"", b"[]", b"\xff\xfe"):
        response = http.post(CHAT, content=body, headers={"content-type": "application/json"})
        assert response.status_code == 400, body
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "headers", "word"),
    [
        (gzip.compress(b'{"model": "tiny"}', mtime=0), {"content-encoding": "gzip"}, "'gzip'"),
        (b"?", {"content-encoding": "zstd"}, "'zstd'"),
        ('{"model": "tiny"}'.encode("utf-16"), {}, "UTF-16"),
    ],
)
def test_a_body_in_another_coding(http: httpx.Client, body: bytes, headers: dict[str, str], word: str) -> None:
    """The error of a compressed body, or one that is not UTF-8, says so, and not that the JSON is bad."""
    response = http.post(CHAT, content=body, headers={"content-type": "application/json", **headers})
    assert response.status_code == 400
    assert word in response.json()["error"]["message"]


def test_a_byte_order_mark(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Some platforms write it in front of every text; it stands for nothing."""
    assert http.post(CHAT, content=codecs.BOM_UTF8 + json.dumps(chat("x")).encode()).status_code == 200


def test_a_bad_parameter_in_the_url(http: httpx.Client) -> None:
    """It is named, with what is wrong, as one in a body is."""
    error = http.get("/v1/responses/resp_x?stream=perhaps").json()["error"]
    assert (error["param"], error["code"]) == ("stream", "invalid_type")
    assert "'stream'" in error["message"] and "bool" in error["message"]


def test_an_unknown_model_is_404_and_a_missing_one_is_the_only_one(http: httpx.Client, leader: ScriptedLeader) -> None:
    """404 model_not_found, naming what is served, before any work; a missing model means the only one."""
    response = http.post(CHAT, json=chat("x", model="gpt-4o"))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "tiny" in error["message"]
    body = chat("x")
    del body["model"]
    assert http.post(CHAT, json=body).json()["model"] == "tiny"
    assert http.post(CHAT, json=body | {"model": ""}).json()["model"] == "tiny"


def test_a_prompt_over_the_context(http: httpx.Client, leader: ScriptedLeader) -> None:
    """400 context_length_exceeded with both numbers."""
    response = http.post(CHAT, json=chat("x" * CONTEXT))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert str(CONTEXT) in error["message"]
    assert leader.claimed == []


def test_a_template_that_refuses(http: httpx.Client) -> None:
    """422 with the template's own words."""
    response = http.post(CHAT, json=chat("forbidden"))
    assert response.status_code == 422
    assert "this template takes no forbidden words" in response.json()["error"]["message"]


def test_unknown_routes_and_methods(http: httpx.Client) -> None:
    """Errors of the framework have OpenAI's shape too."""
    unknown = http.get("/v1/nothing/here")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_url")
    wrong = http.put(CHAT, json={})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


def test_a_wrong_method_is_told_the_right_ones(http: httpx.Client) -> None:
    """A 405 names the methods in its header, and HEAD is a GET without its body."""
    wrong = http.delete("/v1/models")
    assert (wrong.status_code, "GET" in wrong.headers["allow"]) == (405, True)
    for path in ("/v1/models", "/v1/models/tiny", "/health", "/ready"):
        head, get = http.head(path), http.get(path)
        assert (head.status_code, head.content) == (get.status_code, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    assert http.head("/v1/requests/x/events").status_code == 405


@pytest.mark.parametrize(
    ("fields", "legal"),
    [
        ({"priority": "urgent"}, "'high', 'low', 'normal'"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "'text'"),
    ],
)
def test_a_value_that_is_none_of_several(http: httpx.Client, fields: dict[str, Any], legal: str) -> None:
    """The refusal names the value and those that are served."""
    message = http.post(CHAT, json=chat("x") | fields).json()["error"]["message"]
    assert "Invalid enum value" in message and legal in message


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\uDE00\uD83D"])
def test_a_lone_surrogate_is_refused_by_name(http: httpx.Client, half: str) -> None:
    """A lone surrogate is named; the whole pair is a character."""
    body = r'{"messages": [{"role": "user", "content": "a%sb"}]}'
    refused = http.post(CHAT, content=body % half)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_json")
    assert f"{half[:6]} is half of a surrogate pair" in refused.json()["error"]["message"]
    whole = http.post(CHAT, content=body % r"\ud83d\ude00")
    assert whole.json()["choices"][0]["message"]["content"] == "you said a😀b"


def test_request_ids_are_the_farms_own(http: httpx.Client, leader: ScriptedLeader) -> None:
    """X-Request-ID is ours and the id of the answer; the client's own comes back beside it and is never used."""
    response = http.post(CHAT, json=chat("x"), headers={"x-request-id": "mine"})
    rid = response.headers["x-request-id"]
    assert response.json()["id"] == f"chatcmpl-{rid}"
    assert response.headers["x-client-request-id"] == "mine"
    assert leader.claimed[0].rid == rid
    refused = http.post(CHAT, json=chat("x", n=0))
    assert refused.headers["x-request-id"] not in ("", rid)
    for path, name in (
        ("/v1/nowhere", "x-request-id"),
        ("/v1/models/nobody", "x-request-id"),
        ("/v1/messages/x", "request-id"),
    ):
        assert http.get(path).headers[name] not in ("", rid)
