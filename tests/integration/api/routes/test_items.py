"""Reasoning and tool calls in /v1/responses and /v1/messages: through the official clients."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.byte_model import byte_assets
from tests.integration.api.calling import TEMPLATE, called
from tests.integration.api.conftest import ApiProcess, running_api
from tests.leader import ScriptedLeader
from tests.servers import NEW, serving

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: Any = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": False}
TOOL: Any = {"name": "get_weather", "input_schema": SCHEMA}
OSLO, ROME = '{"city": "Oslo"}', '{"city": "Rome"}'
SAID = f"<think>Two cities.</think>I look.\n{called('get_weather', OSLO)}\n{called('get_weather', ROME)}"
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def leading(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ScriptedLeader, ApiProcess]]:
    with serving(NEW) as server:
        leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=TEMPLATE))
        leader.start()
        with running_api(server.url, tmp_path_factory.mktemp("api")) as api:
            yield leader, api
        leader.stop()


@pytest.fixture
def caller(leading: tuple[ScriptedLeader, ApiProcess]) -> ScriptedLeader:
    leading[0].reset()
    leading[0].reply = lambda _: SAID
    return leading[0]


@pytest.fixture
def gpt(leading: tuple[ScriptedLeader, ApiProcess], caller: ScriptedLeader) -> Iterator[openai.OpenAI]:
    url = f"{leading[1].url}/v1"
    with openai.OpenAI(base_url=url, api_key="secret", max_retries=0, timeout=40) as client:
        yield client


@pytest.fixture
def claude(leading: tuple[ScriptedLeader, ApiProcess], caller: ScriptedLeader) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=leading[1].url, api_key="secret", max_retries=0, timeout=40) as client:
        yield client


def test_the_items_of_a_response(gpt: openai.OpenAI) -> None:
    """Thoughts, text and each call are items of their own, in the order in which they came."""
    response = gpt.responses.create(model="tiny", input="Weather?", tools=[FUNCTION])
    thoughts, text, *calls = response.output
    assert thoughts.type == "reasoning" and thoughts.content is not None
    assert (thoughts.content[0].text, text.type, response.output_text.strip()) == ("Two cities.", "message", "I look.")
    assert [(call.type, call.name, json.loads(call.arguments)) for call in calls] == [  # type: ignore[union-attr]
        ("function_call", "get_weather", {"city": "Oslo"}),
        ("function_call", "get_weather", {"city": "Rome"}),
    ]
    assert len({item.id for item in response.output}) == 4
    assert len({call.call_id for call in calls}) == 2  # type: ignore[union-attr]
    assert response.usage is not None and response.usage.output_tokens_details.reasoning_tokens > 0


def test_the_events_of_thoughts_and_calls(gpt: openai.OpenAI) -> None:
    """Each item begins, grows and is done before the next one begins; the helper's snapshot is the stored response."""
    with gpt.responses.stream(model="tiny", input="Weather?", tools=[FUNCTION]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [kind.removeprefix("response.") for kind, _ in itertools.groupby(event.type for event in events)]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    assert gpt.responses.retrieve(final.id).output == [
        type(item).model_validate(item.to_dict()) for item in gpt.responses.retrieve(final.id).output
    ]
    assert [item.id for item in gpt.responses.retrieve(final.id).output] == [item.id for item in final.output]


def test_thoughts_as_a_summary(gpt: openai.OpenAI) -> None:
    """A request for a summary gets the reasoning in its place, and may get it encrypted too."""
    asked: Any = {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"], "store": False}
    events = list(gpt.responses.create(model="tiny", input="Weather?", stream=True, **asked))
    text = "".join(event.delta for event in events if event.type == "response.reasoning_summary_text.delta")
    last = events[-1]
    assert text == "Two cities." and last.type == "response.completed"
    thoughts = last.response.output[0]
    assert thoughts.type == "reasoning" and thoughts.summary[0].text == text
    assert thoughts.encrypted_content
    again: list[Any] = [*ASK, {**thoughts.to_dict(), "summary": []}, {"role": "user", "content": "Go on."}]
    gpt.responses.create(model="tiny", input=again)


def test_results_go_back_to_a_response(gpt: openai.OpenAI, caller: ScriptedLeader) -> None:
    """Two turns by previous_response_id: the calls stand before their results."""
    first = gpt.responses.create(model="tiny", input="Weather?", tools=[FUNCTION])
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"cold in {item.arguments}"}
        for item in first.output
        if item.type == "function_call"
    ]
    caller.reply = lambda _: "Cold."
    second = gpt.responses.create(model="tiny", input=results, previous_response_id=first.id, tools=[FUNCTION])
    assert second.output_text == "Cold."
    prompt = caller.prompt()
    assert prompt.index("Weather?") < prompt.index('"arguments": {"city": "Rome"}') < prompt.index("cold in")
    assert prompt.count("<tool_response>") == 2


def test_the_blocks_of_a_message(claude: Any) -> None:
    """Thoughts, text and calls as blocks; the model's turn ends with tool_use."""
    message = claude.messages.create(
        model="tiny",
        max_tokens=500,
        messages=ASK,
        tools=[TOOL],
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert message.content[0].thinking == "Two cities." and message.content[0].signature
    assert [block.input for block in message.content[2:]] == [{"city": "Oslo"}, {"city": "Rome"}]
    assert message.stop_reason == "tool_use"
    with claude.messages.stream(model="tiny", max_tokens=500, messages=ASK, tools=[TOOL]) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == [block.type for block in message.content]
    assert [block.input for block in final.content[2:]] == [{"city": "Oslo"}, {"city": "Rome"}]


def test_results_go_back_to_a_message(claude: Any, caller: ScriptedLeader) -> None:
    """A turn of the user's with results and text: the results first; one that failed says so."""
    first = claude.messages.create(model="tiny", max_tokens=500, messages=ASK, tools=[TOOL])
    calls = [block.id for block in first.content if block.type == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0], "content": "cold"},
        {
            "type": "tool_result",
            "tool_use_id": calls[1],
            "content": [{"type": "text", "text": "away"}],
            "is_error": True,
        },
        {"type": "text", "text": "And now?"},
    ]
    caller.reply = lambda _: "Cold."
    turns = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    second = claude.messages.create(model="tiny", max_tokens=500, messages=turns, tools=[TOOL])
    assert second.content[0].text == "Cold."
    prompt = caller.prompt()
    assert "<tool_response>cold</tool_response>" in prompt
    assert "<tool_response>Error: away</tool_response>" in prompt
    assert prompt.index("Error: away") < prompt.index("And now?")


def test_thinking_is_off_unless_asked_for(claude: Any, caller: ScriptedLeader) -> None:
    """Anthropic's clients count on text alone where they did not ask: the template's switch is set."""
    caller.reply = lambda _: "Cold."
    for thinking, off in ((None, True), ({"type": "disabled"}, True), ({"type": "adaptive"}, False)):
        given = {} if thinking is None else {"thinking": thinking}
        claude.messages.create(model="tiny", max_tokens=500, messages=ASK, **given)
        prompt = caller.prompt()
        assert prompt.endswith("</think>\n\n") is off
