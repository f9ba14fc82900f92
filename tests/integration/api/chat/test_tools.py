"""Tools and reasoning through OpenAI's client: what it sends reaches the model, what the model says it parses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from tests.integration.api.calling import ASK, TIME, WEATHER, called, leader_with_tools
from tests.integration.api.sse import events
from tests.leader import ScriptedLeader
from tests.servers import Server

NAMED = {"name": "get_weather"}
PARIS = '{"city": "Paris", "days": 2}'


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    with leader_with_tools(server) as leader:
        yield leader


def streamed(chunks: list[Any]) -> tuple[str, str, list[dict[str, str]], str | None]:
    """The sums of a stream: text, reasoning, calls, finish reason; each call begins with its id, type and name."""
    text = reasoning = ""
    calls: list[dict[str, str]] = []
    finish = None
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta
            text += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            assert getattr(delta, "reasoning_content", None) == getattr(delta, "reasoning", None)
            for call in delta.tool_calls or []:
                if call.id is not None:
                    assert (call.index, call.type) == (len(calls), "function")
                    calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
                calls[call.index]["arguments"] += call.function.arguments or ""
            finish = choice.finish_reason or finish
    return text, reasoning, calls, finish


def test_a_tool_call_has_no_content_and_its_own_finish_reason(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Tools reach the template; a call comes back as one, with no content and its own finish reason."""
    leader.reply = lambda _: called("get_weather", PARIS)
    answer = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER, TIME])
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == (None, "tool_calls")
    assert message.tool_calls is not None
    [call] = message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", PARIS)
    shown = leader.prompt().splitlines()
    assert json.loads(shown[0].removeprefix("<tools>")) == WEATHER
    assert json.loads(shown[1])["function"]["parameters"] == {"type": "object", "properties": {}}


def test_streamed_calls_come_in_parts_after_the_text(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Text, then two calls in parallel, whose arguments come in parts."""
    leader.reply = lambda _: f"I look.\n{called('get_weather', PARIS)}\n{called('get_time', '{}')}"
    stream = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER, TIME], stream=True)
    chunks = list(stream)
    text, _, calls, finish = streamed(chunks)
    assert (text, finish) == ("I look.", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls] == [("get_weather", PARIS), ("get_time", "{}")]
    assert calls[0]["id"] != calls[1]["id"]


class Weather(pydantic.BaseModel):
    city: str
    days: int


def test_the_clients_own_helpers(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Arguments are parsed into the caller's own class, whole and from a stream."""
    leader.reply = lambda _: f"<think>so</think>I look.\n{called('get_weather', PARIS)}"
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    whole = client.chat.completions.parse(model="tiny", messages=ASK, tools=[tool]).choices[0].message
    assert whole.tool_calls is not None and whole.content == "I look."
    assert whole.tool_calls[0].function.parsed_arguments == Weather(city="Paris", days=2)
    with client.chat.completions.stream(model="tiny", messages=ASK, tools=[tool]) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [event.parsed_arguments for event in done] == [Weather(city="Paris", days=2)]
    assert final.message.tool_calls is not None and final.finish_reason == "tool_calls"
    assert final.message.content == "I look."


def test_arguments_come_while_they_are_made(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The beginning of the arguments is there before their end was made."""
    reply = called("get_weather", PARIS)
    leader.reply = lambda _: reply
    leader.pause()
    leader.step(reply.index("Paris") + 3)
    got = ""
    with client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], stream=True) as stream:
        for chunk in stream:
            for call in chunk.choices[0].delta.tool_calls or []:
                assert call.function is not None
                got += call.function.arguments or ""
            if got == '{"city": "Par':
                leader.resume()
    assert got == PARIS


def test_a_conversation_with_results(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The client's own message objects are sent back as they are, with results; arguments reach the model as JSON."""
    leader.reply = lambda prompt: "It rains." if "tool_response" in prompt else called("get_weather", PARIS)
    first = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER]).choices[0].message
    assert first.tool_calls is not None
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    second = client.chat.completions.create(model="tiny", messages=[*ASK, first, result], tools=[WEATHER])  # type: ignore[list-item]
    assert (second.choices[0].message.content, second.choices[0].finish_reason) == ("It rains.", "stop")
    assert leader.prompt().endswith(
        f'assistant: <tool_call>{{"name": "get_weather", "arguments": {PARIS}}}</tool_call>\n'
        "tool: <tool_response>rain</tool_response>\nassistant: "
    )


def test_a_resumed_call_has_the_same_id(client: openai.OpenAI, http: httpx.Client, leader: ScriptedLeader) -> None:
    """A client that resumes inside a call, or reads it again, gets the same id and the same arguments."""
    leader.reply = lambda _: f"<think>so</think>{called('get_weather', PARIS)}"
    body = {"messages": ASK, "tools": [WEATHER], "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        first = list(events(response.iter_lines()))
    again = list(events(http.get(f"/v1/requests/{first[0].id.partition(':')[0]}/events").text.splitlines()))

    def whole(found: list[Any]) -> tuple[set[str], str, str]:
        deltas = [choice["delta"] for event in found if event.data for choice in event.data["choices"]]
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        return (
            {call["id"] for call in calls if "id" in call},
            "".join(call["function"]["arguments"] for call in calls),
            "".join(delta.get("reasoning", "") for delta in deltas),
        )

    assert whole(first) == whole(again)
    assert (len(whole(first)[0]), whole(first)[1:]) == (1, (PARIS, "so"))
    for event in first[:-1]:
        answer = http.get(f"/v1/requests/{event.id.partition(':')[0]}/events", headers={"last-event-id": event.id})
        before = first[: first.index(event) + 1]
        assert whole([*before, *events(answer.text.splitlines())]) == whole(first)


def test_several_choices_and_a_single_call(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """With n=2 each choice has calls of its own; without parallel calls only the first of each counts."""
    leader.reply = lambda _: called("get_weather", PARIS) + called("get_time", "{}")
    answer = client.chat.completions.create(
        model="tiny", messages=ASK, tools=[WEATHER, TIME], n=2, parallel_tool_calls=False
    )
    calls = [choice.message.tool_calls or [] for choice in answer.choices]
    assert [len(of_one) for of_one in calls] == [1, 1]
    assert calls[0][0].id != calls[1][0].id


def test_without_tools_nothing_is_a_call(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Where the request offers no tools, or forbids them, the template gets none and the text stays text."""
    said = called("get_weather", PARIS)
    leader.reply = lambda _: said
    plain = client.chat.completions.create(model="tiny", messages=ASK).choices[0]
    forbidden = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], tool_choice="none")
    for choice in (plain, forbidden.choices[0]):
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (said, None, "stop")
    assert "<tools>" not in leader.prompt()


def test_reasoning_is_apart_from_the_answer_and_counted(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Reasoning is apart from the answer, streamed and not, and its tokens are counted."""
    said = "<think>\nLet me see.\n</think>\n\nYes."
    leader.reply = lambda _: said
    answer = client.chat.completions.create(model="tiny", messages=ASK)
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("Yes.", "Let me see.", "Let me see.")
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == said.index("\n\nYes")
    hidden = client.chat.completions.create(model="tiny", messages=ASK, extra_body={"include_reasoning": False})
    assert hidden.choices[0].message.content == "Yes." and hidden.usage == answer.usage
    assert not getattr(hidden.choices[0].message, "reasoning", None)
    stream = client.chat.completions.create(
        model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert streamed(chunks) == ("Yes.", "Let me see.", [], "stop")
    assert chunks[-1].usage == answer.usage


def test_reasoning_effort_sets_the_switch_of_the_template(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The effort sets the template's own switch; the reasoning of earlier turns is taken back."""
    client.chat.completions.create(model="tiny", messages=ASK, reasoning_effort="none")
    assert "</think>" in leader.prompt()
    client.chat.completions.create(model="tiny", messages=ASK, reasoning_effort="high")
    assert "</think>" not in leader.prompt()
    client.chat.completions.create(
        model="tiny",
        messages=[*ASK, {"role": "assistant", "content": "Yes.", "reasoning": "so"}, *ASK],  # type: ignore[list-item]
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    assert "</think>" in leader.prompt()


def test_stop_strings_and_logprobs(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A stop string ends the answer inside a call too; every token of the call has its log probability."""
    leader.reply = lambda _: called("get_weather", PARIS)
    cut = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], stop=["ris"]).choices[0]
    assert cut.message.tool_calls is not None and cut.message.tool_calls[0].type == "function"
    assert cut.message.tool_calls[0].function.arguments == '{"city": "Pa'
    whole = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], logprobs=True).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert "".join(token.token for token in whole.logprobs.content) == called("get_weather", PARIS)
    short = client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER], max_tokens=60).choices[0]
    assert short.finish_reason == "length" and short.message.tool_calls is not None


def test_a_demanded_call_gives_the_leader_a_grammar(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The leader is given a grammar of calls; a named function ends as OpenAI ends it."""
    leader.reply = lambda _: called("get_weather", PARIS)
    for choice, finish in (("required", "tool_calls"), ({"type": "function", "function": NAMED}, "stop")):
        answer = client.chat.completions.create(
            model="tiny",
            messages=ASK,
            tools=[WEATHER, TIME],
            tool_choice=choice,  # type: ignore[arg-type]
        )
        grammar = leader.claimed[-1].params.sampling.grammar
        assert grammar is not None and grammar.kind == "lark"
        assert ("get_time" in grammar.text) == (choice == "required")
        assert answer.choices[0].message.tool_calls is not None and answer.choices[0].finish_reason == finish
    client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])
    assert leader.claimed[-1].params.sampling.grammar is None


def test_only_allowed_tools_are_offered(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Only the tools that are allowed are offered, and called if one must be."""
    allowed: Any = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_time"}}]}
    leader.reply = lambda _: called("get_time", "{}")
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        tools=[WEATHER, TIME],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
    )
    grammar = leader.claimed[-1].params.sampling.grammar
    assert "get_weather" not in leader.prompt() and grammar is not None and "get_weather" not in grammar.text
    assert answer.choices[0].finish_reason == "tool_calls"


def test_a_form_after_reasoning(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A model that reasons may do so before an answer in JSON, and the two are told apart."""
    leader.reply = lambda _: '<think>\nso\n</think>\n\n{"a": 1}'
    answer = client.chat.completions.create(model="tiny", messages=ASK, response_format={"type": "json_object"})
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning) == ('{"a": 1}', "so")
    grammar = leader.claimed[-1].params.sampling.grammar
    assert grammar is not None and "</think>" in grammar.text
