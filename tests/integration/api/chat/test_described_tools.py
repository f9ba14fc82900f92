"""Tools work with templates that take none: in chat, responses and messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.byte_model import byte_assets
from tests.integration.api.calling import TIME, WEATHER
from tests.leader import ScriptedLeader
from tests.servers import Server

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% elif (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "<turn>{{ 'model' if message.role == 'assistant' else 'user' }}: {{ message.content | trim }}"
    "{% endfor %}{% if add_generation_prompt %}<turn>model: {% endif %}"
)
"""As Gemma 2's: no system message, turns that alternate, nothing about tools."""
ARGUMENTS = {"city": "Zürich", "days": 2}
CALL = json.dumps({"name": "get_weather", "arguments": ARGUMENTS}, ensure_ascii=False)
USER = {"role": "user", "content": "How is it?"}
FUNCTION = WEATHER["function"]


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=TEMPLATE))
    leader.start()
    yield leader
    leader.stop()


@pytest.fixture
def caller(leader: ScriptedLeader) -> ScriptedLeader:
    """It asks for the weather, and says it after the result."""
    leader.reply = lambda prompt: "It rains." if "rain" in prompt else f"```json\n{CALL}\n```"
    return leader


def post(http: httpx.Client, path: str, **body: Any) -> Any:
    """The answer, which has a warning about the tools."""
    answer = http.post(path, json={"model": "tiny"} | body)
    assert answer.status_code == 200, answer.text
    assert "takes no tools" in answer.headers["warning"]
    return answer.json()


def check_second_prompt(leader: ScriptedLeader) -> None:
    """The call as it was written, and its result as a turn of the user."""
    turns = leader.prompt().split("<turn>")
    assert "You can call these functions" in turns[1] and turns[1].endswith("How is it?")
    assert turns[2:4] == [f"model: {CALL}", "user: Result of get_weather:\nrain"]


def test_a_loop_in_chat_completions(http: httpx.Client, caller: ScriptedLeader) -> None:
    message = post(http, "/v1/chat/completions", messages=[USER], tools=[WEATHER, TIME])["choices"][0]["message"]
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", ARGUMENTS)
    history = [USER, message, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    answer = post(http, "/v1/chat/completions", messages=history, tools=[WEATHER, TIME])["choices"][0]["message"]
    assert (answer["content"], answer.get("tool_calls")) == ("It rains.", None)
    check_second_prompt(caller)


def test_a_loop_in_responses(http: httpx.Client, caller: ScriptedLeader) -> None:
    tools = [{"type": "function", "name": FUNCTION["name"], "parameters": FUNCTION["parameters"]}]
    [call] = post(http, "/v1/responses", input=[USER], tools=tools)["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    [said] = post(http, "/v1/responses", input=[USER, call, result], tools=tools)["output"]
    assert said["content"][0]["text"] == "It rains."
    check_second_prompt(caller)


def test_a_loop_in_messages(http: httpx.Client, caller: ScriptedLeader) -> None:
    fields: dict[str, Any] = {
        "max_tokens": 300,
        "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
    }
    answer = post(http, "/v1/messages", messages=[USER], **fields)
    [used] = answer["content"]
    assert (used["name"], used["input"], answer["stop_reason"]) == ("get_weather", ARGUMENTS, "tool_use")
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "rain"}
    history = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    [said] = post(http, "/v1/messages", messages=history, **fields)["content"]
    assert said["text"] == "It rains."
    check_second_prompt(caller)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_demanded_call_is_constrained(http: httpx.Client, caller: ScriptedLeader, choice: Any) -> None:
    """To plain JSON, with the functions that may be called."""
    post(http, "/v1/chat/completions", messages=[USER], tools=[WEATHER, TIME], tool_choice=choice)
    grammar = caller.claimed[-1].params.sampling.grammar
    assert grammar is not None and "get_time" in grammar.text
    assert ("get_weather" in grammar.text) == (choice == "required")
