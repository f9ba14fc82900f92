"""Events and bodies fit the official SDKs' types: which their clients themselves do not check."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from openai.types.responses import Response, ResponseItem, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from tests.byte_model import byte_assets
from tests.integration.api.calling import TEMPLATE, called
from tests.integration.api.conftest import running_api
from tests.integration.api.sse import blocks
from tests.leader import ScriptedLeader
from tests.servers import NEW, serving

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
SAID = f"<think>Hm.</think>I look.\n{called('get_weather', '{}')}"
RESPONSE: dict[str, Any] = {
    "model": "tiny",
    "input": [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "Where?"}],
    "instructions": "I.",
    "tools": [{"type": "function", "name": "get_weather", "parameters": SCHEMA}],
    "metadata": {"a": "b"},
}
MESSAGE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 500,
    "messages": [{"role": "user", "content": "Weather?"}],
    "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"background": True},
    {"max_output_tokens": 20},
    {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedLeader, httpx.Client]]:
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=TEMPLATE))
        leader.reply = lambda _: SAID
        leader.start()
        with (
            running_api(server.url, tmp_path_factory.mktemp("api")) as api,
            httpx.Client(base_url=api.url, timeout=40) as http,
        ):
            yield leader, http
        leader.stop()


def described(http: httpx.Client, path: str) -> tuple[Any, Any]:
    """Validators of a path's events and of its bodies, as the OpenAPI document says they are."""
    document = http.get("/schema/openapi.json").raise_for_status().json()
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    kinds = (content["text/event-stream"]["x-event-data"], content["application/json"]["schema"])
    events, body = [jsonschema.Draft202012Validator({**kind, "components": document["components"]}) for kind in kinds]
    return events, body


def streamed(http: httpx.Client, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Each event's name and data."""
    text = http.post(path, json=body | {"stream": True}).raise_for_status().text
    events = [block.splitlines() for block in blocks(text)]
    return [
        (event[1].removeprefix("event: "), msgspec.json.decode(event[2].removeprefix("data: "))) for event in events
    ]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(variant) or "plain")
def test_events_and_bodies_of_responses(speaker: tuple[ScriptedLeader, httpx.Client], variant: dict[str, Any]) -> None:
    """Required fields are there, and values are of their types, the SDK's and those that the OpenAPI document tells."""
    _, http = speaker
    events = streamed(http, "/v1/responses", RESPONSE | variant)
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    described_event, described_body = described(http, "/v1/responses")
    for name, data in events:
        assert event_type.validate_python(data, strict=True).type == name == data["type"]
        described_event.validate(data)
    last = events[-1][1]["response"]
    described_body.validate(last)
    assert Response.model_validate(last, strict=True).output
    again = http.get(f"/v1/responses/{last['id']}").json()
    assert again == last
    items = http.get(f"/v1/responses/{last['id']}/input_items").json()
    item_type: TypeAdapter[Any] = TypeAdapter(ResponseItem)
    assert [item_type.validate_python(item, strict=True).type for item in items["data"]] == ["message"] * 2


def test_a_failed_response_has_the_types_of_the_sdk(speaker: tuple[ScriptedLeader, httpx.Client]) -> None:
    """An answer with an error is of the SDK's types, too."""
    leader, http = speaker
    leader.fail_at = 5
    events = streamed(http, "/v1/responses", RESPONSE)
    leader.fail_at = None
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    assert [event_type.validate_python(data, strict=True) for _, data in events][-1].type == "response.failed"


def test_events_and_bodies_of_messages(speaker: tuple[ScriptedLeader, httpx.Client]) -> None:
    """As for responses; `ping` has no type of its own in the SDK."""
    _, http = speaker
    event_type: TypeAdapter[Any] = TypeAdapter(anthropic.types.RawMessageStreamEvent)
    described_event, described_body = described(http, "/v1/messages")
    for variant in ({}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"max_tokens": 12}):
        events = streamed(http, "/v1/messages", MESSAGE | variant)
        for name, data in events:
            assert name == data["type"]
            described_event.validate(data)
            if name != "ping":
                event_type.validate_python(data, strict=True)
        body = http.post("/v1/messages", json=MESSAGE | variant).raise_for_status().json()
        described_body.validate(body)
        message = anthropic.types.Message.model_validate(body, strict=True)
        assert message.content and message.stop_reason == ("max_tokens" if "max_tokens" in variant else "tool_use")


def test_a_missing_field_is_found() -> None:
    """The control: the types are strict here, other than where the clients read them."""
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    with pytest.raises(ValidationError, match="item_id"):
        event_type.validate_python({"type": "response.output_text.delta", "delta": "x", "sequence_number": 1})
