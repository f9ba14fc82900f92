"""/v1/responses through OpenAI's client: what it sends is served, and what it parses is what it gets."""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pydantic
import pytest

from control import keys
from control.keys import ModelKeys
from control.records.responses import KEYLESS
from tests.leader import ScriptedLeader
from tests.waiting import until

KEYS = ModelKeys("tiny")
REQUIRED = {
    "response": (
        "id object created_at completed_at status incomplete_details model previous_response_id instructions output "
        "error tools tool_choice truncation parallel_tool_calls text top_p presence_penalty frequency_penalty "
        "top_logprobs temperature reasoning user usage max_output_tokens max_tool_calls store background service_tier "
        "metadata safety_identifier prompt_cache_key"
    ),
    "message": "type id status role content",
    "text": "type text annotations logprobs",
    "usage": "input_tokens output_tokens total_tokens input_tokens_details output_tokens_details",
    "tool": "type name description parameters strict",
}
"""The fields that the Open Responses document requires."""


def test_a_response_has_openais_fields_and_usage(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """One body with OpenAI's fields: the text in a message item, the usage, and what the request said."""
    response = client.responses.create(
        model="tiny", input="hello", instructions="Be short.", metadata={"a": "b"}, max_output_tokens=50, user="me"
    )
    assert (response.object, response.status, response.output_text) == ("response", "completed", "you said hello")
    assert leader.prompt() == "system: Be short.\nuser: hello\n"
    assert response.instructions == "Be short." and response.metadata == {"a": "b"}
    assert (response.max_output_tokens, response.user, response.parallel_tool_calls) == (50, "me", True)
    assert response.output[0].type == "message" and response.output[0].status == "completed"
    assert response.usage is not None
    assert response.usage.input_tokens == len(leader.claimed[0].params.prompt)
    assert response.usage.output_tokens == len("you said hello") + 1
    assert response.completed_at is not None and response.completed_at >= response.created_at


def test_the_events_of_a_stream(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """OpenAI's events in OpenAI's order, numbered without a gap; the last one has the whole response."""
    with client.responses.create(model="tiny", input="naïve 😀", stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [kind for kind, _ in itertools.groupby(event.type for event in events)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == "you said naïve 😀"
    last = events[-1]
    assert last.type == "response.completed" and last.response.output_text == text
    stored = client.responses.retrieve(last.response.id)
    assert stored.model_dump() == last.response.model_dump()


def test_every_field_that_open_responses_requires(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Whole, in each event that has the response, and stored."""
    request_body: Any = {"model": "tiny", "input": "hello", "presence_penalty": 0.5}
    request_body |= {"tools": [{"type": "function", "name": "f"}], "tool_choice": "none"}
    whole = client.post("/responses", cast_to=dict[str, Any], body=request_body)
    with client.responses.create(stream=True, extra_body=request_body) as stream:
        event_list: Any = [event for event in stream if hasattr(event, "response")]
    stored = client.get(f"/responses/{whole['id']}", cast_to=dict[str, Any])
    assert len(event_list) == 3 and stored == whole and whole["presence_penalty"] == 0.5
    for response in (whole, *(event.response.to_dict() for event in event_list)):
        assert set(REQUIRED["response"].split()) <= set(response)
        assert set(REQUIRED["tool"].split()) <= set(response["tools"][0])
    assert set(REQUIRED["message"].split()) <= set(whole["output"][0])
    assert set(REQUIRED["text"].split()) <= set(whole["output"][0]["content"][0])
    assert set(REQUIRED["usage"].split()) <= set(whole["usage"])


def test_the_streaming_helper_accumulates_the_same_response(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The client's own accumulation follows every event and ends with the same response."""
    with client.responses.stream(model="tiny", input="hello") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == "you said hello"


async def test_openais_asynchronous_client_creates_and_streams(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """Create and stream, as the synchronous one does."""
    async with openai.AsyncOpenAI(base_url=str(client.base_url), api_key="secret", max_retries=0) as other:
        response = await other.responses.create(model="tiny", input="hello")
        assert response.output_text == "you said hello"
        stream = await other.responses.create(model="tiny", input="hello", stream=True)
        kinds = [event.type async for event in stream]
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"


def test_a_response_that_is_cut_by_its_limit(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """It is incomplete and says why, streamed or not."""
    response = client.responses.create(model="tiny", input="hello", max_output_tokens=3)
    assert (response.status, response.output_text) == ("incomplete", "you")
    assert response.incomplete_details is not None and response.incomplete_details.reason == "max_output_tokens"
    events = list(client.responses.create(model="tiny", input="hello", max_output_tokens=3, stream=True))
    assert events[-1].type == "response.incomplete" and events[-1].response.status == "incomplete"


def test_log_probabilities_come_where_include_names_them(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """They come with the text where `include` asks for them."""
    leader.reply = lambda _: "aé"
    response = client.responses.create(
        model="tiny", input="x", include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = response.output[0].content[0]  # type: ignore[union-attr]
    assert part.logprobs is not None  # type: ignore[union-attr]
    assert [token.token for token in part.logprobs] == ["a", "bytes:\\xc3", "bytes:\\xa9"]  # type: ignore[union-attr]
    assert len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr]


class City(pydantic.BaseModel):
    name: str
    people: int


def test_an_answer_in_a_given_form(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """`parse` sends the type's schema, which reaches the leader as a grammar, and reads the answer as that type."""
    leader.reply = lambda _: '{"name": "Oslo", "people": 709037}'
    response = client.responses.parse(model="tiny", input="x", text_format=City)
    assert response.output_parsed == City(name="Oslo", people=709037)
    grammar = leader.claimed[0].params.sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema" and "people" in grammar.text
    assert response.text is not None and response.text.format is not None and response.text.format.type == "json_schema"
    with client.responses.stream(model="tiny", input="x", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Oslo", people=709037)
    client.responses.create(model="tiny", input="x", text={"format": {"type": "json_object"}})
    assert leader.claimed[-1].params.sampling.grammar is not None
    bad: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="x", text=bad)
    assert (caught.value.param or "").startswith("text.format")


def test_a_conversation_goes_on(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The items of every earlier turn come first; instructions are each request's own."""
    first = client.responses.create(model="tiny", input="one", instructions="I.")
    second = client.responses.create(model="tiny", input="two", previous_response_id=first.id)
    third = client.responses.create(model="tiny", input="three", previous_response_id=second.id, instructions="II.")
    assert leader.prompt(1) == "user: one\nassistant: you said one\nuser: two\n"
    assert leader.prompt(2) == (
        "system: II.\nuser: one\nassistant: you said one\nuser: two\nassistant: you said two\nuser: three\n"
    )
    assert third.previous_response_id == second.id
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        client.responses.create(model="tiny", input="four", previous_response_id=third.id)


def test_items_of_earlier_answers_as_input(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """An answer's own items are taken back as they are, and by reference."""
    first = client.responses.create(model="tiny", input="one")
    given: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "one"}]}]
    given += [item.model_dump() for item in first.output]
    client.responses.create(model="tiny", input=[*given, {"role": "user", "content": "two"}])
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    client.responses.create(model="tiny", input=[given[0], reference, {"role": "user", "content": "two"}])
    for at in (1, 2):
        assert leader.prompt(at) == "user: one\nassistant: you said one\nuser: two\n"


def test_what_is_not_stored_is_not_there(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """`store: false` keeps nothing; nor is another tenant's response there."""
    unstored = client.responses.create(model="tiny", input="x", store=False)
    stored = client.responses.create(model="tiny", input="x")
    stranger = client.with_options(api_key="another")
    assert (unstored.to_dict()["store"], stored.to_dict()["store"]) == (False, True)
    for asker, response in ((client, unstored), (stranger, stored)):
        with pytest.raises(openai.NotFoundError, match=response.id):
            asker.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError) as caught:
            asker.responses.create(model="tiny", input="y", previous_response_id=response.id)
        assert caught.value.param == "previous_response_id"


def test_input_items_are_listed_in_pages_and_both_orders(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The input of a request can be listed, in pages and in both orders."""
    said: list[Any] = [{"role": "user", "content": f"part {index}"} for index in range(5)]
    response = client.responses.create(model="tiny", input=said)
    listed = list(client.responses.input_items.list(response.id, order="asc", limit=2))
    assert [item.content[0].text for item in listed] == [f"part {index}" for index in range(5)]  # type: ignore[union-attr]
    newest = client.responses.input_items.list(response.id)
    assert newest.data[0].content[0].text == "part 4" and not newest.has_more  # type: ignore[union-attr]


def test_a_background_response_can_be_read_while_it_grows(
    client: openai.OpenAI, leader: ScriptedLeader, redis_client: Any
) -> None:
    """It is answered at once, can be read while it grows, and is stored with nobody at the other side."""
    leader.pause()
    response = client.responses.create(model="tiny", input="hello", background=True)
    assert response.status == "queued" and response.output == []
    until(lambda: client.responses.retrieve(response.id).status == "in_progress")
    leader.step(3)
    until(lambda: client.responses.retrieve(response.id).output_text == "you")
    leader.resume()
    until(lambda: redis_client.hget(keys.ResponseKeys(KEYLESS).record(response.id[5:]), "response"))
    done = client.responses.retrieve(response.id)
    assert (done.status, done.output_text, done.background) == ("completed", "you said hello", True)
    until(lambda: redis_client.zscore(keys.OPEN_RESPONSES, f"{response.id[5:]} {KEYLESS}") is None)


def test_a_cancelled_response_keeps_its_text(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A background response can be cancelled; its text so far stays, and a second cancel changes nothing."""
    leader.pause()
    response = client.responses.create(model="tiny", input="hello", background=True)
    leader.step(3)
    until(lambda: client.responses.retrieve(response.id).output_text == "you")
    leader.step(0)
    cancelled = client.responses.cancel(response.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "you")
    assert client.responses.cancel(response.id).status == "cancelled"


def test_a_stream_taken_up_by_number(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """`starting_after` gives exactly the events that come after that number, while it runs and after its end."""
    events = list(client.responses.create(model="tiny", input="hello", stream=True))
    first = events[0]
    assert first.type == "response.created"
    for number in (-1, 0, 4, len(events) - 2):
        again = list(client.responses.retrieve(first.response.id, stream=True, starting_after=number))
        assert [event.sequence_number for event in again] == list(range(number + 1, len(events)))
        assert [event.type for event in again] == [event.type for event in events[number + 1 :]]


def test_a_failed_stream_and_its_stored_response_agree(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A stream that fails ends with response.failed, and the stored response says the same."""
    leader.fail_at = 3
    events = list(client.responses.create(model="tiny", input="hello", stream=True))
    last = events[-1]
    assert last.type == "response.failed" and last.response.error is not None
    assert last.response.error.message == "the logits were not finite"
    stored = client.responses.retrieve(last.response.id)
    assert (stored.status, stored.output_text) == ("failed", "you")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"mirostat": 2}, "mirostat"),
        ({"truncation": "sometimes"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice"),
        ({"input": [{"type": "telepathy"}]}, "input[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0].image_url",
        ),
        ({"input": [{"role": "user", "content": 7}]}, "input[0].content"),
        ({"background": True, "store": False}, "background"),
        ({"temperature": 6}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x" * 5000}, "input"),
        ({"previous_response_id": "resp_nope"}, "previous_response_id"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ],
)
def test_a_bad_field_is_named(client: openai.OpenAI, leader: ScriptedLeader, fields: Any, param: str) -> None:
    """In the names of this endpoint, and nothing reaches a leader."""
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(
            model="tiny", **({"input": "x"} | fields if "mirostat" not in fields else {"input": "x"}), extra_body=fields
        )
    assert (caught.value.status_code, caught.value.param) == (404 if "previous" in param else 400, param)
    assert leader.claimed == []


def test_counted_input_tokens_are_those_of_the_response(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """The count of a body that is not sent is that of the same body when it is."""
    counted = client.responses.input_tokens.count(model="tiny", input="hello", instructions="Be short.")
    response = client.responses.create(model="tiny", input="hello", instructions="Be short.")
    assert response.usage is not None and counted.input_tokens == response.usage.input_tokens
