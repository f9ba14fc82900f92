"""The official OpenAI client works: what it sends is honoured, what it parses is what comes."""

from __future__ import annotations

from typing import Literal

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.timeout(180)


class Verdict(BaseModel):
    word: Literal["yes", "no", "perhaps"]
    sure: bool


QUESTION = [{"role": "user", "content": "What is a poisoned replica?"}]


def test_the_model_is_listed(client: openai.OpenAI) -> None:
    """The served model appears under its name, in the list and alone."""
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"


def test_chat_stream_and_whole_agree(client: openai.OpenAI) -> None:
    """A greedy answer is the same streamed and whole, ends by itself, and is counted alike."""
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    text, reasons, usage, ids = "", [], None, set()
    stream = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        ids.add(chunk.id)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content != ""
    assert reasons == [whole.choices[0].finish_reason] == ["stop"]
    assert len(ids) == 1
    assert usage == whole.usage


def test_completions_stream_and_whole_agree(client: openai.OpenAI) -> None:
    """The older endpoint does the same, and stops at max_tokens with that reason."""
    request_body = {"model": "demo", "prompt": "1, 2, 3,", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**request_body)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**request_body, stream=True))
    assert streamed == whole.choices[0].text != ""
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12


def test_choices_differ_by_their_noise_and_repeat_by_their_seed(client: openai.OpenAI) -> None:
    """n choices of one request are different samples, and the same seed gives the same ones again."""

    def sample(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="demo", messages=QUESTION, n=3, seed=seed, temperature=2.0, max_tokens=24
        )
        return [choice.message.content for choice in answer.choices]

    first = sample(7)
    assert len(set(first)) == 3
    assert sample(7) == first != sample(8)


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    """Every choice of a hot model is what the schema says, whole and streamed."""
    request_body = {"model": "demo", "messages": QUESTION, "seed": 1, "max_tokens": 200, "response_format": Verdict}
    whole = client.chat.completions.parse(**request_body, n=2)
    assert all(isinstance(choice.message.parsed, Verdict) for choice in whole.choices)
    with client.chat.completions.stream(**request_body) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].message.parsed == whole.choices[0].message.parsed


def test_a_stop_string_ends_the_answer_and_is_cut_off(client: openai.OpenAI) -> None:
    """The text ends before the stop string, streamed and whole."""
    request_body = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Count from 1 to 20."}],
        "temperature": 0,
        "stop": [", 7"],
    }
    whole = client.chat.completions.create(**request_body)
    assert whole.choices[0].message.content.endswith("6")
    assert whole.choices[0].finish_reason == "stop"
    chunks = client.chat.completions.create(**request_body, stream=True)
    streamed = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert streamed == whole.choices[0].message.content


LONG = "word " * 140_000
"""More than the context."""


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"model": "nope"}, openai.NotFoundError, "nope"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"messages": [{"role": "user", "content": LONG}]}, openai.BadRequestError, "maximum context length"),
        ({"n": "2"}, openai.BadRequestError, "'n'"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"extra_body": {"mirostat": 2}}, openai.BadRequestError, "mirostat"),
    ],
)
def test_refusals_name_what_is_wrong(
    client: openai.OpenAI, changes: dict[str, object], error: type[openai.APIStatusError], says: str
) -> None:
    """Each bad request is refused with the client's own exception type, and the text names the value."""
    with pytest.raises(error) as caught:
        client.chat.completions.create(**({"model": "demo", "messages": QUESTION} | changes))
    assert says in str(caught.value)
