"""/v1/messages through Anthropic's client: what it sends is served, and what it parses is what it gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.byte_model import CONTEXT
from tests.integration.api.conftest import ApiProcess
from tests.leader import ScriptedLeader

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
def claude(api: ApiProcess) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=api.url, api_key="secret", max_retries=0, timeout=40) as client:
        yield client


def test_a_message_has_anthropics_fields_and_counts_cached_input(claude: Any, leader: ScriptedLeader) -> None:
    """One body with Anthropic's fields; the input from the cache is counted apart."""
    leader.cached = 3
    message = claude.messages.create(
        model="tiny",
        max_tokens=50,
        messages=HELLO,
        system="Be short.",
        metadata={"user_id": "me"},
        extra_body={"top_k": 5, "temperature": 0.5},
    )
    claimed = leader.claimed[0].params
    assert leader.tokenizer.decode(claimed.prompt) == "system: Be short.\nuser: hello\n"
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert [(block.type, block.text) for block in message.content] == [("text", "you said hello")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens == len(claimed.prompt) - 3
    assert message.usage.cache_read_input_tokens == 3
    assert message.usage.output_tokens == len("you said hello") + 1
    sampling = claimed.sampling
    assert (sampling.max_tokens, sampling.top_k, sampling.temperature) == (50, 5, 0.5)
    assert message._request_id == message.id.removeprefix("msg_")


def test_the_events_of_a_stream(claude: Any, leader: ScriptedLeader) -> None:
    """Anthropic's events in Anthropic's order; the final message is the one that is not streamed."""
    events = list(claude.messages.create(model="tiny", max_tokens=50, messages=HELLO, stream=True))
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0].message.usage.input_tokens == len(leader.claimed[0].params.prompt)
    with claude.messages.stream(model="tiny", max_tokens=50, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "you said hello"
        final = stream.get_final_message()
    whole = claude.messages.create(model="tiny", max_tokens=50, messages=HELLO)
    for message in (final, whole):
        assert (message.content[0].text, message.stop_reason) == ("you said hello", "end_turn")
        assert message.usage.output_tokens == len("you said hello") + 1


async def test_anthropics_asynchronous_client_creates_streams_and_counts(
    api: ApiProcess, leader: ScriptedLeader
) -> None:
    """Create, stream and count, as the synchronous one does."""
    async with anthropic.AsyncAnthropic(base_url=api.url, api_key="secret", max_retries=0) as client:
        message = await client.messages.create(model="tiny", max_tokens=50, messages=HELLO)
        assert message.content[0].text == "you said hello"
        async with client.messages.stream(model="tiny", max_tokens=50, messages=HELLO) as stream:
            assert "".join([text async for text in stream.text_stream]) == "you said hello"
        count = await client.messages.count_tokens(model="tiny", messages=HELLO)
        assert count.input_tokens == message.usage.input_tokens


def test_stop_reason_is_the_limit_a_stop_sequence_or_the_end(claude: Any, leader: ScriptedLeader) -> None:
    """The limit, a stop sequence by its own text, or the model itself."""
    leader.reply = lambda _: "one STOP two"
    cut = claude.messages.create(model="tiny", max_tokens=3, messages=HELLO)
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "one")
    stopped = claude.messages.create(model="tiny", max_tokens=50, messages=HELLO, stop_sequences=["never", "STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == "one "


def test_a_limit_beyond_the_context(claude: Any, leader: ScriptedLeader) -> None:
    """Clients send large limits, because one is required: what there is room for is made, and the reason told."""
    message = claude.messages.create(model="tiny", max_tokens=100_000, messages=HELLO)
    claimed = leader.claimed[0].params
    assert claimed.sampling.max_tokens == leader.assets.context_length - len(claimed.prompt)
    assert (message.stop_reason, message.content[0].text) == ("end_turn", "you said hello")
    leader.reply = lambda _: "x" * 5000
    full = claude.messages.create(model="tiny", max_tokens=100_000, messages=HELLO)
    assert full.stop_reason == "model_context_window_exceeded"
    assert full.usage.input_tokens + full.usage.output_tokens == leader.assets.context_length


def test_blocks_of_a_conversation(claude: Any, leader: ScriptedLeader) -> None:
    """Text in blocks, hints for the cache, and answers that are sent back."""
    first = claude.messages.create(model="tiny", max_tokens=50, messages=HELLO)
    claude.messages.create(
        model="tiny",
        max_tokens=50,
        system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": "again"},
        ],
    )
    assert leader.tokenizer.decode(leader.claimed[1].params.prompt) == (
        "system: Be short.\nuser: hello\nassistant: you said hello\nuser: again\n"
    )


def test_an_answer_in_a_given_form(claude: Any, leader: ScriptedLeader) -> None:
    """`output_config` with a schema reaches the leader as a grammar."""
    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "additionalProperties": False}
    request_body = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    claude.messages.create(model="tiny", max_tokens=50, messages=HELLO, extra_body=request_body)
    grammar = leader.claimed[0].params.sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema"


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "names"),
    [
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"temperature": 6}, 400, "invalid_request_error", "temperature"),
        ({"use_beam_search": True}, 400, "invalid_request_error", "use_beam_search"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "messages[0].content[0]"),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools[0].input_schema"),
        ({"model": "gpt-4o"}, 404, "not_found_error", "gpt-4o"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "invalid_request_error", "context"),
    ],
)
def test_a_refusal_has_anthropics_shape_and_names_the_value(
    http: httpx.Client, leader: ScriptedLeader, fields: dict[str, Any], status: int, kind: str, names: str
) -> None:
    """Anthropic's shape and types, with the value at fault in the words, and nothing reaches a leader."""
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO} | fields
    response = http.post("/v1/messages", json=body, headers={"anthropic-version": "2023-06-01"})
    error = response.json()
    assert (response.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert names in error["error"]["message"]
    assert error["request_id"] == response.headers["request-id"]
    assert leader.claimed == []


def test_what_their_tool_runner_asks_first(claude: Any, leader: ScriptedLeader) -> None:
    """It wants the server to keep the conversation; refused under Anthropic's code, it sends all messages each time."""
    leader.reply = lambda prompt: "done"
    runner = claude.beta.messages.tool_runner(model="tiny", max_tokens=9, messages=HELLO, tools=[])
    assert [message.content[0].text for message in runner] == ["done"]
    with pytest.raises(anthropic.BadRequestError, match="'thread'") as refused:
        claude.messages.create(model="tiny", max_tokens=9, messages=HELLO, extra_body={"thread": {"type": "create"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert refused.value.body["error"]["details"] == details


def test_their_list_of_models(claude: Any, leader: ScriptedLeader) -> None:
    """The fields that their client reads stand beside OpenAI's."""
    [model] = claude.models.list()
    assert (model.id, model.type, model.display_name, model.max_input_tokens) == ("tiny", "model", "tiny", CONTEXT)
    assert model.created_at.timestamp() == leader.assets.created
    assert claude.models.retrieve("tiny") == model


def test_a_missing_max_tokens_is_refused(http: httpx.Client) -> None:
    """`max_tokens` has no default in this API; an unknown method has Anthropic's shape too."""
    response = http.post("/v1/messages", json={"model": "tiny", "messages": HELLO})
    assert "max_tokens" in response.json()["error"]["message"] and response.status_code == 400
    assert http.get("/v1/messages").json()["type"] == "error"


def test_a_failure_in_mid_stream(claude: Any, leader: ScriptedLeader) -> None:
    """It is an error event, which the client raises."""
    leader.fail_at = 3
    stream = claude.messages.create(model="tiny", max_tokens=50, messages=HELLO, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="the logits were not finite"):
        list(stream)


def test_keys_under_either_name(http: httpx.Client, leader: ScriptedLeader) -> None:
    """Anthropic's clients name their key themselves; both names stand for the same tenant."""
    body = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
    one = http.post("/v1/messages", json=body, headers={"x-api-key": "k"})
    two = http.post("/v1/messages", json=body, headers={"authorization": "Bearer k"})
    assert (one.status_code, two.status_code) == (200, 200)
    assert len({claimed.tenant for claimed in leader.claimed}) == 1
