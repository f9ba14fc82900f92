"""instructor, over the official OpenAI client."""

from __future__ import annotations

import threading
from typing import Any

import instructor
import openai
from checks import BASE_URL, FAULT_URL, FAULTS, KEY, MODEL, TURNS, check, inject, main, terse
from pydantic import BaseModel, Field

ASK: Any = [{"role": "user", "content": "Is a poisoned replica healthy?"}]


class Verdict(BaseModel):
    ok: bool


class Story(BaseModel):
    text: str = Field(json_schema_extra={"minLength": 200, "maxLength": 200})


def ask(mode: instructor.Mode) -> Verdict:
    inner = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
    client = instructor.from_openai(inner, mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        response_model=Verdict,
        max_retries=0,
        max_tokens=200,
        temperature=0,
        logit_bias=terse(),
    )


@check("an object by a required tool")
def tools() -> None:
    assert isinstance(ask(instructor.Mode.TOOLS), Verdict)


@check("an object by a JSON schema")
def schema() -> None:
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Verdict)


@check("two turns by a tool, default settings")
def turns() -> None:
    class City(BaseModel):
        """The city that is asked for."""

        city: str

    client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY))
    messages: Any = [{"role": "user", "content": TURNS[0]}]
    place, answer = client.chat.completions.create_with_completion(model=MODEL, messages=messages, response_model=City)
    [call] = answer.choices[0].message.tool_calls
    messages += [
        answer.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    messages.append({"role": "user", "content": "What is the weather in Oslo?"})
    assert place.city and client.chat.completions.create(model=MODEL, messages=messages, response_model=City).city


def story() -> str:
    """In parts, of which the last one is whole."""
    client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0))
    fields: Any = {"max_tokens": 400, "temperature": 0}
    parts = list(client.chat.completions.create_partial(model=MODEL, messages=ASK, response_model=Story, **fields))
    assert len(parts) > 1, parts
    return parts[-1].text


for title, fault in FAULTS.items() if FAULT_URL else ():

    @check(f"an object in parts: {title}")
    def disturbed(fault: str = fault) -> None:
        """instructor hands out a text when it is whole, so the fault comes from beside it."""
        whole = story()
        beside = threading.Thread(target=inject, args=(f"{fault}?busy",))
        beside.start()
        assert story() == whole
        beside.join()


main()
