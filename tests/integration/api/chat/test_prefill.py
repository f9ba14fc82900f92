"""An answer continues the last message: in chat and Messages; only the continuation comes, read from the middle."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.byte_model import byte_assets
from tests.integration.api.calling import ASK, TEMPLATE, WEATHER
from tests.integration.api.conftest import ApiProcess
from tests.integration.api.sse import events
from tests.leader import ScriptedLeader
from tests.servers import Server

ENDS = TEMPLATE.replace(
    "{{- 'assistant: ' }}", "{%- if add_generation_prompt %}{{- 'assistant: <think>\\n' }}{% endif %}"
)
"""A template that begins each new turn with reasoning."""
BEGUN: list[Any] = [*ASK, {"role": "assistant", "content": "It is"}]
CONTINUED: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
CALL = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.fixture(scope="module")
def leader_of_module(server: Server) -> Iterator[ScriptedLeader]:
    leader = ScriptedLeader(server.url, assets=byte_assets(chat_template=ENDS))
    leader.start()
    yield leader
    leader.stop()


def test_chat_holds_only_the_continuation(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The prompt ends within the message; whole and streamed, for each choice; with `echo` the message comes first."""
    leader.reply = lambda _: " warm."
    whole = client.chat.completions.create(model="tiny", messages=BEGUN, n=2, extra_body=CONTINUED)
    assert leader.prompt() == "user: How is it in Paris?\nassistant: It is"
    assert [choice.message.content for choice in whole.choices] == [" warm.", " warm."]
    echoed = client.chat.completions.create(model="tiny", messages=BEGUN, extra_body=CONTINUED | {"echo": True})
    assert echoed.choices[0].message.content == "It is warm."
    for echo, expected in ((False, " warm."), (True, "It is warm.")):
        asked = CONTINUED | {"echo": echo}
        stream = client.chat.completions.create(model="tiny", messages=BEGUN, n=2, stream=True, extra_body=asked)
        texts = ["", ""]
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == [expected] * 2


def test_a_new_turn_follows_an_assistants_message_without_the_parameter(
    client: openai.OpenAI, leader: ScriptedLeader
) -> None:
    """As at OpenAI and in vLLM. Without a generation prompt the template ends after the last message."""
    leader.reply = lambda _: "so</think>warm."
    turn = client.chat.completions.create(model="tiny", messages=BEGUN)
    assert leader.prompt().endswith("assistant: It is\nassistant: <think>\n")
    assert turn.choices[0].message.content == "warm."
    client.chat.completions.create(model="tiny", messages=BEGUN, extra_body={"add_generation_prompt": False})
    assert leader.prompt().endswith("assistant: It is\n")


def test_reasoning_and_calls_that_the_message_has_begun(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The rest of the reasoning is reasoning; a call is returned whole, with the part that the message had."""
    leader.reply = lambda _: f" think.</think>\n{CALL[:30]}"
    messages: list[Any] = [*ASK, {"role": "assistant", "content": "<think>\nI"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=[WEATHER], extra_body=CONTINUED)
    message: Any = answer.choices[0].message
    assert message.reasoning == " think." and message.tool_calls is None
    leader.reply = lambda _: CALL[30:]
    messages = [*ASK, {"role": "assistant", "content": f"I look. {CALL[:30]}"}]
    for stream in (False, True):
        request_body: Any = {"model": "tiny", "messages": messages, "tools": [WEATHER], "extra_body": CONTINUED}
        if stream:
            parts = list(client.chat.completions.create(**request_body, stream=True))
            deltas = [call for chunk in parts for call in chunk.choices[0].delta.tool_calls or []]
            assert (deltas[0].function.name, parts[-1].choices[0].finish_reason) == ("get_weather", "tool_calls")
            assert json.loads("".join(call.function.arguments for call in deltas)) == {"city": "Paris"}
        else:
            [call] = client.chat.completions.create(**request_body).choices[0].message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


def test_a_stream_of_a_continuation_is_resumed(http: httpx.Client, leader: ScriptedLeader) -> None:
    """After any event the rest comes, the echoed message included where it was not sent."""
    leader.reply = lambda _: " warm in Paris."
    body = {"model": "tiny", "messages": BEGUN, "stream": True, "echo": True, "on_disconnect": "continue", **CONTINUED}
    whole = list(events(http.post("/v1/chat/completions", json=body).text.splitlines()))
    assert [event.text for event in whole[:1]] == ["It is"] and whole[0].id is not None
    rid = whole[0].id.partition(":")[0]
    for place in (0, 1):
        headers = {"last-event-id": whole[place].id or ""}
        rest = list(events(http.get(f"/v1/requests/{rid}/events", headers=headers).text.splitlines()))
        assert "".join(event.text for event in [*whole[: place + 1], *rest]) == "It is warm in Paris."


@pytest.fixture
def claude(api: ApiProcess) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")
    with anthropic.Anthropic(base_url=api.url, api_key="secret", max_retries=0, timeout=40) as client:
        yield client


def test_a_last_turn_of_the_assistant_is_continued(claude: Any, leader: ScriptedLeader) -> None:
    """Whole and streamed; count_tokens counts the same prompt; an empty turn begins nothing."""
    leader.reply = lambda _: " warm."
    message = claude.messages.create(model="tiny", max_tokens=50, messages=BEGUN)
    assert leader.prompt() == "user: How is it in Paris?\nassistant: It is"
    assert [(block.type, block.text) for block in message.content] == [("text", " warm.")]
    assert claude.messages.count_tokens(model="tiny", messages=BEGUN).input_tokens == message.usage.input_tokens
    blocks = [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "It"}, {"type": "text", "text": " is"}]}]
    with claude.messages.stream(model="tiny", max_tokens=50, messages=blocks) as stream:
        assert "".join(stream.text_stream) == " warm."
    assert leader.prompt().endswith("assistant: It is")
    for empty in ("", [], [{"type": "text", "text": ""}]):
        claude.messages.create(model="tiny", max_tokens=50, messages=[*ASK, {"role": "assistant", "content": empty}])
        assert leader.prompt().startswith("user: How is it in Paris?\nassistant: <think>")


USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {}}


@pytest.mark.parametrize(
    ("content", "fields", "names"),
    [
        ("It is ", {}, "messages"),
        ([{"type": "text", "text": "It is\n"}], {}, "white space"),
        ([{"type": "text", "text": "I look."}, USE], {}, "tool_result"),
        ("{", {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}}, "output_config"),
    ],
)
def test_a_beginning_that_anthropic_refuses(
    http: httpx.Client, leader: ScriptedLeader, content: Any, fields: dict[str, Any], names: str
) -> None:
    """White space at the end, a call without its result, a form of the whole answer: a 400 that says so."""
    body = {"model": "tiny", "max_tokens": 9, "messages": [*ASK, {"role": "assistant", "content": content}], **fields}
    response = http.post("/v1/messages", json=body)
    assert response.status_code == 400 and names in response.json()["error"]["message"]
    assert leader.claimed == []
