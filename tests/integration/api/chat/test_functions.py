"""OpenAI's older `functions` and `function_call`: offered as tools, and answered in their own form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.integration.api.calling import ASK, TIME, WEATHER, called, leader_with_tools
from tests.leader import ScriptedLeader
from tests.servers import Server

FUNCTIONS: list[Any] = [WEATHER["function"], TIME["function"]]
PARIS = '{"city": "Paris"}'


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    with leader_with_tools(server) as leader:
        yield leader


def test_a_call_in_the_older_form_and_its_result(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The template sees tools; the message that comes is sent back as it is, with a result of role function."""
    leader.reply = lambda prompt: (
        "It rains." if "tool_response" in prompt else f"{called('get_weather', PARIS)}{called('get_time', '{}')}"
    )
    request_body: Any = {"model": "tiny", "functions": FUNCTIONS, "function_call": "auto"}
    first = client.chat.completions.create(**request_body, messages=ASK).choices[0]
    assert json.loads(leader.prompt().splitlines()[0].removeprefix("<tools>")) == WEATHER
    assert (first.finish_reason, first.message.content, first.message.tool_calls) == ("function_call", None, None)
    call = first.message.function_call
    assert call is not None and (call.name, call.arguments) == ("get_weather", PARIS)
    messages = [*ASK, first.message, {"role": "function", "name": "get_weather", "content": "rain"}]
    second = client.chat.completions.create(**request_body, messages=messages).choices[0]
    assert (second.message.content, second.finish_reason) == ("It rains.", "stop")
    history = 'assistant: <tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>\n'
    assert f"{history}tool: <tool_response>rain</tool_response>\n" in leader.prompt()


def test_a_stream_in_the_older_form(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The name once, then the arguments, then the finish reason; the text before the call is content."""
    leader.reply = lambda _: f"I look.\n{called('get_weather', PARIS)}"
    stream = client.chat.completions.create(model="tiny", messages=ASK, functions=FUNCTIONS, stream=True)
    deltas = [chunk.choices[0] for chunk in stream]
    calls = [choice.delta.function_call for choice in deltas if choice.delta.function_call is not None]
    assert [call.name for call in calls if call.name] == ["get_weather"] and calls[0].name
    assert "".join(call.arguments or "" for call in calls) == PARIS
    assert "".join(choice.delta.content or "" for choice in deltas) == "I look."
    assert deltas[-1].finish_reason == "function_call" and not any(choice.delta.tool_calls for choice in deltas)


def test_a_named_function_is_demanded_and_none_offers_nothing(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """`function_call` means what `tool_choice` means."""
    leader.reply = lambda _: called("get_weather", PARIS)
    choice = client.chat.completions.create(
        model="tiny", messages=ASK, functions=FUNCTIONS, function_call={"name": "get_weather"}
    ).choices[0]
    assert leader.claimed[-1].params.sampling.grammar is not None
    assert choice.message.function_call is not None and choice.finish_reason == "stop"
    client.chat.completions.create(model="tiny", messages=ASK, functions=FUNCTIONS, function_call="none")
    assert "<tools>" not in leader.prompt()


CALL = {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"functions": FUNCTIONS, "tools": [WEATHER]}, "tools"),
        ({"functions": FUNCTIONS, "tool_choice": "required"}, "tool_choice"),
        ({"function_call": {"name": "get_weather"}}, "function_call"),
        ({"functions": FUNCTIONS, "function_call": {"name": "other"}}, "function_call.name"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"functions": [*FUNCTIONS, {"name": "a b"}]}, "functions[2].name"),
        ({"functions": [{"name": "f", "parameters": {"type": "string"}}]}, "functions[0].parameters"),
        ({"functions": [{"name": f"f{index}"} for index in range(1025)]}, "functions"),
        ({"messages": [*ASK, {"role": "function", "content": "x"}]}, "messages[1].name"),
        (
            {"messages": [{"role": "assistant", "function_call": CALL, "tool_calls": [{"id": "a", "function": CALL}]}]},
            "messages[0].function_call",
        ),
    ],
)
def test_what_the_older_form_can_not_say(
    http: httpx.Client, leader: ScriptedLeader, changes: dict[str, Any], param: str
) -> None:
    """A 400 in the older names; the two forms are not mixed."""
    response = http.post("/v1/chat/completions", json={"messages": ASK} | changes)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert leader.claimed == []
