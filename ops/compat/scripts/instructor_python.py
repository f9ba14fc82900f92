"""instructor, over the official OpenAI client."""

from __future__ import annotations

from typing import Any

import instructor
import openai
from checks import BASE_URL, KEY, MODEL, check, main, pause, pausing, terse
from pydantic import BaseModel

ASK: Any = [{"role": "user", "content": "Is a poisoned replica healthy?"}]


class Answer(BaseModel):
    ok: bool


def ask(mode: instructor.Mode) -> Answer:
    inner = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
    client = instructor.from_openai(inner, mode=mode)
    return client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        response_model=Answer,
        max_retries=0,
        max_tokens=200,
        temperature=0,
        logit_bias=terse(),
    )


@check("an object by a required tool")
def tools() -> None:
    assert isinstance(ask(instructor.Mode.TOOLS), Answer)


@check("an object by a JSON schema")
def schema() -> None:
    assert isinstance(ask(instructor.Mode.JSON_SCHEMA), Answer)


@pausing("an object in parts, stopped leader")
def silent() -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0))
    pause()
    fields: Any = {"max_tokens": 200, "temperature": 0, "logit_bias": terse()}
    parts = list(client.chat.completions.create_partial(model=MODEL, messages=ASK, response_model=Answer, **fields))
    assert isinstance(parts[-1].ok, bool)


main()
