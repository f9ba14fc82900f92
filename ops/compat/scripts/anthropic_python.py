"""Anthropic's official client for Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import pydantic
from checks import ASK, BASE_URL, CITY, KEY, LONG, LOOP, MODEL, check, main, messages_loop, refused, undisturbed

client = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key=KEY, max_retries=0, timeout=60)
GREEDY = {"temperature": 0}
WEATHER: Any = {"name": "get_weather", "input_schema": CITY}


def ask(**fields: Any) -> Any:
    return client.messages.create(
        **({"model": MODEL, "messages": ASK, "max_tokens": 24, "extra_body": GREEDY} | fields)
    )


@check("a message, whole")
def whole() -> None:
    answer = ask(system="You are brief.")
    assert answer.type == "message" and answer.role == "assistant" and answer.content[0].text
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens > 0


@check("a streamed message, equal to the whole one")
def streamed() -> None:
    with client.messages.stream(model=MODEL, messages=ASK, max_tokens=24, extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == ask().content[0].text
    assert final.usage.output_tokens > 0


@check("counting of tokens")
def count() -> None:
    assert client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens == ask().usage.input_tokens


@check("stop sequences and limits")
def stop() -> None:
    word = ask().content[0].text.split()[2]
    stopped = ask(stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert ask(max_tokens=2).stop_reason == "max_tokens"


@check("errors as the client's exceptions")
def errors() -> None:
    error = refused(anthropic.NotFoundError, lambda: ask(model="no-such-model"))
    assert error.body["error"]["type"] == "not_found_error"
    error = refused(anthropic.BadRequestError, lambda: ask(messages=[]))
    assert error.body["error"]["type"] == "invalid_request_error"


@check("a required tool and its result")
def tools() -> None:
    answer = ask(tools=[WEATHER], tool_choice={"type": "any"}, max_tokens=200)
    [used] = [block for block in answer.content if block.type == "tool_use"]
    assert (answer.stop_reason, used.name) == ("tool_use", "get_weather") and "city" in used.input
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "rain"}]}
    history = [*ASK, {"role": "assistant", "content": answer.content}, result]
    assert ask(messages=history, tools=[WEATHER]).role == "assistant"


@check("structured output, parsed")
def structured() -> None:
    class ReplicaState(pydantic.BaseModel):
        state: Literal["healthy", "poisoned"]
        ranks: int

    answer = client.messages.parse(
        model=MODEL, messages=ASK, max_tokens=200, output_format=ReplicaState, extra_body=GREEDY
    )
    assert isinstance(answer.parsed_output, ReplicaState)


@check("the tool runner")
def runner() -> None:
    cities: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return "sunny"

    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    turns = client.beta.messages.tool_runner(
        model=MODEL, messages=question, max_tokens=200, tools=[get_weather], extra_body=GREEDY
    )
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert cities == ["Paris"]


@check(LOOP)
def loop() -> None:
    def ask(messages: list[Any]) -> Any:
        with client.messages.stream(model=MODEL, messages=messages, tools=[WEATHER], max_tokens=400) as stream:
            return stream.get_final_message()

    messages_loop(ask)


@check("models, listed and retrieved")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    model = client.models.retrieve(MODEL)
    assert model.type == "model" and model.created_at.year > 2000 and model.display_name


@undisturbed()
def texts() -> Iterator[str]:
    messages: Any = [{"role": "user", "content": LONG}]
    with client.messages.stream(model=MODEL, messages=messages, max_tokens=150, extra_body=GREEDY) as stream:
        yield from stream.text_stream


main()
