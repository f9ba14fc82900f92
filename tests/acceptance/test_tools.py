"""Demanded tool calls are enforced: whatever the model would rather say, against a whole farm."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

pytestmark = pytest.mark.timeout(180)

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": [1, 2]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
ASK: list[Any] = [{"role": "user", "content": "Tell me a story about a dog."}]


CITY: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def fits(call: Any) -> bool:
    """True if a call names one of the tools and its arguments are those of that tool."""
    arguments = json.loads(call.function.arguments)
    if call.function.name == "add":
        return set(arguments) == {"a", "b"} and 0 <= arguments["a"] <= 99 and arguments["b"] in (1, 2)
    return (
        call.function.name == "get_weather"
        and set(arguments) == {"city", "unit"}
        and len(arguments["city"]) <= 12
        and arguments["unit"] in ("celsius", "fahrenheit")
    )


def test_a_demanded_call_fits_its_schema(client: openai.OpenAI) -> None:
    """At any temperature, for each choice: one call of a tool that is there, with arguments that fit."""
    answer = client.chat.completions.create(
        model="demo",
        messages=ASK,
        tools=[WEATHER, ADD],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=2.0,
        seed=1,
        n=4,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls or []
        assert fits(call)


def test_a_named_call_streamed_and_whole_agree(client: openai.OpenAI) -> None:
    """The named function is called, with the same arguments part by part and at once."""
    request_body: dict[str, Any] = {
        "model": "demo",
        "messages": ASK,
        "tools": [WEATHER, ADD],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "temperature": 0,
    }
    [call] = client.chat.completions.create(**request_body).choices[0].message.tool_calls or []
    parts = [
        part
        for chunk in client.chat.completions.create(**request_body, stream=True)
        for choice in chunk.choices
        for part in choice.delta.tool_calls or []
    ]
    assert call.type == "function" and fits(call)
    assert parts[0].id is not None and parts[0].function is not None and parts[0].function.name == "add"
    assert "".join(part.function.arguments or "" for part in parts if part.function) == call.function.arguments


def test_the_model_calls_a_tool_by_itself(client: openai.OpenAI) -> None:
    """Asked about the weather it calls the tool, and says the result; without the tool it doesn't know."""
    asked: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(model="demo", messages=asked, tools=[CITY], temperature=0).choices[0]
    assert first.finish_reason == "tool_calls"
    [call] = first.message.tool_calls or []
    assert call.type == "function" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"}
    second = client.chat.completions.create(
        model="demo",
        messages=[*asked, first.message, result],  # type: ignore[list-item]
        tools=[CITY],
        temperature=0,
    ).choices[0]
    assert (second.message.content, second.finish_reason) == ("The weather in Paris: sunny, 21 degrees.", "stop")
    without = client.chat.completions.create(model="demo", messages=asked, temperature=0).choices[0]
    assert (without.message.content or "").startswith("I do not know that")
