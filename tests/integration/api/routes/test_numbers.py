"""Hostile numbers are answered or refused: none takes a place of the queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from control.keys import ModelKeys
from tests.integration.api.conftest import ApiProcess, running_api
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server
from tests.waiting import until

NUMBERS = ("-1", "1e17", "1e308", "1e309", "5e-324", str(2**53 + 1), str(2**63), str(2**64), "1" + "0" * 400, "NaN")
NUMBERS += ("true", "Infinity", '"1"', "0.5")
COMMON = ("temperature", "top_p", "min_p", "top_k", "seed", "repetition_penalty", "min_tokens", "timeout", "deadline")
COMMON += ("typical_p", "on_disconnect", "stop_token_ids", "logit_bias", "priority")
CHAT = (
    "n",
    "max_tokens",
    "max_completion_tokens",
    "presence_penalty",
    "top_logprobs",
    "prompt_logprobs",
    "response_format",
)
DIALECTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": (chat("x") | {"max_tokens": 4}, (*COMMON, *CHAT, "tools", "chat_template_kwargs")),
    "/v1/completions": (
        {"prompt": "x", "max_tokens": 4},
        (*COMMON, "n", "best_of", "logprobs", "max_tokens", "prompt", "guided_json"),
    ),
    "/v1/responses": (
        {"input": "x", "max_output_tokens": 4, "store": False},
        (*COMMON, "max_output_tokens", "top_logprobs", "max_tool_calls", "presence_penalty", "text", "reasoning"),
    ),
    "/v1/messages": (
        {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4},
        (*COMMON, "max_tokens", "thinking", "output_config"),
    ),
}
INSIDE = {
    "stop_token_ids": "[@]",
    "logit_bias": '{"7": @}',
    "prompt": "[@]",
    "response_format": '{"type": "json_object", "schema": {"type": "array", "maxItems": @}}',
    "guided_json": '{"type": "string", "maxLength": @}',
    "text": '{"format": {"type": "json_schema", "name": "a", "schema": {"type": "integer", "maximum": @}}}',
    "output_config": '{"format": {"type": "json_schema", "schema": {"type": "string", "minLength": @}}}',
    "tools": '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "minProperties": @}}}]',
    "chat_template_kwargs": '{"a": @}',
    "thinking": '{"type": "enabled", "budget_tokens": @}',
    "reasoning": '{"effort": @}',
}
"""Where the number stands inside of a field."""


@pytest.fixture(scope="module")
def narrow(
    server: Server, leader_of_module: ScriptedLeader, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApiProcess]:
    """A process with room for two waiting requests."""
    with running_api(server.url, tmp_path_factory.mktemp("narrow"), "--max-queued", "2") as api:
        yield api


def errors_of(api: ApiProcess) -> list[dict[str, Any]]:
    return [line for line in api.lines if line.get("level") in ("error", "critical")]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", DIALECTS)
def test_no_number_is_a_failure_of_the_server(
    narrow: ApiProcess, leader: ScriptedLeader, redis_client: Any, path: str
) -> None:
    """Answered, or refused with a 400 that names a field; the queue is as empty as before, by its own count too."""
    body, fields = DIALECTS[path]
    refused = 0
    with httpx.Client(base_url=narrow.url, timeout=40) as http:
        for field in fields:
            for number in NUMBERS:
                told = json.dumps(body | {field: "@@"}).replace('"@@"', INSIDE.get(field, "@").replace("@", number))
                answer = http.post(path, content=told, headers={"content-type": "application/json"})
                if field == "timeout" and ("deadline" in answer.text or "expired" in answer.text):
                    continue  # a time that is over before an answer can be
                assert answer.status_code < 500, (field, number, answer.text)
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    assert answer.status_code in (400, 413, 422), (field, number, error)
                    refused += 1
        assert refused > len(NUMBERS)
        load = ModelKeys("tiny").load
        until(lambda: [int(count or 0) for count in redis_client.hmget(load, "queued", "queued_tokens")] == [0, 0])
        assert http.post(path, json=body).status_code == 200
    assert errors_of(narrow) == []


def test_a_timeout_beyond_all_time_takes_no_place(narrow: ApiProcess, leader: ScriptedLeader) -> None:
    """It was a 500 after the place had been counted: ten of them shut everybody out."""
    with httpx.Client(base_url=narrow.url, timeout=40) as http:
        for _ in range(10):
            answer = http.post("/v1/chat/completions", json=chat("x") | {"timeout": 1e17, "on_disconnect": "continue"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout")
            assert "1e+17 must be above 0 and at most 86400" in answer.json()["error"]["message"]
        assert http.post("/v1/chat/completions", json=chat("x")).status_code == 200


@pytest.mark.parametrize("number", ["-1", "1e17", str(2**40 + 1), str(2**63), "1" + "0" * 400, "true", "NaN", '"1"'])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("keys", ("rpm", "tpm", "max_concurrent", "expires")),
        ("models/load", ("tp", "replicas", "max_context", "kv_tokens", "drain_s")),
        ("models/scale", ("replicas",)),
    ],
)
def test_a_wrong_number_of_an_operator_is_refused_by_field(
    api: ApiProcess, http: httpx.Client, path: str, fields: tuple[str, ...], number: str
) -> None:
    """A refusal that names the field, and neither key nor model."""
    before = http.get("/farm/keys").json(), http.get("/farm/models").json()["data"][0]["model"]
    for field in fields:
        body: dict[str, Any] = {"source": "demo"} if path == "models/load" else {}
        body |= {"model": "tiny"} if path == "models/scale" else {}
        told = json.dumps(body | {field: "@"}).replace('"@"', number)
        if (field, number) == ("expires", str(2**40 + 1)):
            continue  # a year that a key may have
        answer = http.post(f"/farm/{path}", content=told, headers={"content-type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert number in ("NaN",) or answer.json()["error"]["param"] == field
    assert before == (http.get("/farm/keys").json(), http.get("/farm/models").json()["data"][0]["model"])


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/v1/responses/resp_x/input_items?limit={}", "limit"),
        ("/v1/responses/resp_x?stream=true&starting_after={}", "starting_after"),
        ("/farm/usage?days={}", "days"),
    ],
)
def test_numbers_of_a_query(http: httpx.Client, path: str, param: str) -> None:
    """Also those in a URL."""
    for number in ("-2", "1e17", str(2**63), "9" * 400, "nan", "9" * 5000):
        answer = http.get(path.format(number))
        assert answer.status_code in (400, 404), answer.text
        assert answer.status_code == 404 or answer.json()["error"]["param"] == param


@pytest.mark.parametrize("seq", ["0", str(2**63), str(2**64), "9" * 400, "9" * 5000])
def test_a_place_that_no_stream_has(http: httpx.Client, leader: ScriptedLeader, seq: str) -> None:
    """An event id with numbers beyond all logs continues nothing, and is no failure of the server."""
    rid = http.post("/v1/chat/completions", json=chat("x")).headers["x-request-id"]
    for place in (f"{rid}:{seq}.1", f"{rid}:1.{seq}", f"{rid}:{seq}.{seq},1.1"):
        answer = http.get(f"/v1/requests/{rid}/events", headers={"last-event-id": place})
        assert answer.status_code < 500, answer.text
