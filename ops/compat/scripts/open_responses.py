"""The cases of Open Responses' acceptance tests (openresponses.org/compliance), held against its published types.

The suite itself is in no registry: these are requests of the same content, each answer and event validated by
`openresponses-types`, which is generated from the specification's OpenAPI document. They are greedy, as the
demonstration model does not end every sampled answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Union

import httpx
import openresponses_types
from checks import BASE_URL, KEY, LONG, MODEL, check, main, undisturbed
from openresponses_types import ResponseResource
from pydantic import TypeAdapter

http = httpx.Client(headers={"authorization": f"Bearer {KEY}"}, timeout=60, trust_env=False)
EVENTS = [kind for name, kind in vars(openresponses_types).items() if name.endswith("StreamingEvent")]
EVENT = TypeAdapter(Union[tuple(EVENTS)])  # noqa: UP007
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "For example Oslo"}},
        "required": ["city"],
    },
}
DOT = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"


def turn(role: str, content: Any, **fields: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content} | fields


def posted(path: str, **body: Any) -> Any:
    answer = http.post(f"{BASE_URL}{path}", json={"model": MODEL} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def respond(*items: Any, **fields: Any) -> dict[str, Any]:
    """A response that is valid and has an output."""
    response = posted("/responses", input=list(items), temperature=0, **fields)
    ResponseResource.model_validate(response)
    assert response["output"], response
    return response


def complete(*items: Any, **fields: Any) -> dict[str, Any]:
    response = respond(*items, **fields)
    assert response["status"] == "completed", response
    return response


def events(*items: Any, **fields: Any) -> Iterator[dict[str, Any]]:
    """The events of a stream, each of them valid, numbered without a gap and named as its data is."""
    body = {"model": MODEL, "input": list(items), "stream": True, "temperature": 0} | fields
    with http.stream("POST", f"{BASE_URL}/responses", json=body) as stream:
        assert stream.status_code == 200, stream.read()
        kind = ""
        count = 0
        for line in stream.iter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            if name == "data" and value != "[DONE]":
                event = json.loads(value)
                EVENT.validate_python(event)
                assert (event["type"], event["sequence_number"]) == (kind, count), event
                count += 1
                yield event


@check("Basic Text Response")
def basic() -> None:
    complete(turn("user", "Say hello in three words."))


@check("Streaming Response")
def streaming() -> None:
    last = list(events(turn("user", "Count from 1 to 5.")))[-1]
    ResponseResource.model_validate(last["response"])
    assert last["response"]["status"] == "completed"


@check("System Prompt")
def system() -> None:
    complete(turn("system", "You are a pirate."), turn("user", "Say hello."))


@check("Multi-turn Conversation")
def turns() -> None:
    complete(turn("user", "My name is Alice."), turn("assistant", "Hello Alice!"), turn("user", "What is my name?"))


@check("Assistant Message Phase")
def phase() -> None:
    looking = turn("assistant", "I look at the ranks.", phase="commentary")
    complete(turn("user", "Hello"), looking, turn("assistant", "Hello!", phase="final_answer"), turn("user", "Thanks"))


@check("Tool Calling")
def tools() -> None:
    response = respond(turn("user", "What is the weather in Paris?"), tools=[WEATHER])
    assert "function_call" in [item["type"] for item in response["output"]], response["output"]


@check("Tool Calling (Streaming)")
def streamed_tools() -> None:
    stream = list(events(turn("user", "What is the weather in Paris?"), tools=[WEATHER]))
    kinds = [event["type"] for event in stream]
    items = [(event["type"], event["item"]["type"]) for event in stream if "item" in event]
    for end in ("added", "done"):
        assert (f"response.output_item.{end}", "function_call") in items, items
    for end in ("delta", "done"):
        assert f"response.function_call_arguments.{end}" in kinds, kinds


@check("Function Call Round Trip")
def roundtrip() -> None:
    ask = turn("user", "What is the weather in Paris?")
    choice = {"type": "function", "name": "get_weather"}
    first = respond(ask, tools=[WEATHER], tool_choice=choice)
    [call] = [item for item in first["output"] if item["type"] == "function_call"]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny, 21 degrees"}
    complete(ask, *first["output"], output, tools=[WEATHER])


@check("Previous Response ID")
def previous() -> None:
    first = complete(turn("user", "My name is Alice."))
    second = complete(turn("user", "What is my name?"), previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]


@check("Image Input")
def image() -> None:
    part = {"type": "input_image", "image_url": f"data:image/png;base64,{DOT}"}
    complete(turn("user", [{"type": "input_text", "text": "What do you see?"}, part]))


@check("Compaction Endpoint")
def compaction() -> None:
    items = [turn("user", "My name is Alice."), turn("assistant", "Hello Alice!")]
    compacted = posted("/responses/compact", input=items, prompt_cache_key="a")
    assert compacted["object"] == "response.compaction" and compacted["usage"]["total_tokens"] > 0, compacted
    assert "compaction" in [item["type"] for item in compacted["output"]], compacted
    complete(*compacted["output"], turn("user", "What is my name?"))


@check("Compaction Missing Required Model")
def no_model() -> None:
    answer = http.post(f"{BASE_URL}/responses/compact", json={"input": "Hello"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == "model", answer.text


@check("WebSocket Response")
def websocket() -> None:
    headers = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    answer = http.get(f"{BASE_URL}/responses", headers=headers | {"sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="})
    assert answer.status_code == 101, answer.text


@undisturbed()
def texts() -> Iterator[str]:
    for event in events(turn("user", LONG), max_output_tokens=150):
        if event["type"] == "response.output_text.delta":
            yield event["delta"]


main()
