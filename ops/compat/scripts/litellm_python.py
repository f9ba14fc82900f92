"""litellm, through its `openai/` provider."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import litellm
from checks import ASK, BASE_URL, KEY, LONG, LOOP, MODEL, WEATHER, chat_loop, check, main, refused, terse, undisturbed

WHERE: Any = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "num_retries": 0, "temperature": 0}


@check("a chat, whole and streamed")
def chat() -> None:
    whole = litellm.completion(messages=ASK, max_tokens=24, **WHERE)
    stream = litellm.completion(messages=ASK, max_tokens=24, stream=True, **WHERE)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content and text
    assert whole.usage.total_tokens > 0


@check("the asynchronous call")
async def asynchronous() -> None:
    answer = await litellm.acompletion(messages=ASK, max_tokens=8, **WHERE)
    assert answer.choices[0].message.content


@check("a text completion")
def completion() -> None:
    settings = WHERE | {"model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(prompt="One two three", max_tokens=6, **settings).choices[0].text


@check("errors as litellm's exceptions")
def errors() -> None:
    wrong: Any = {"model": "openai/no-such-model"}
    refused(litellm.NotFoundError, lambda: litellm.completion(messages=ASK, **(WHERE | wrong)))
    refused(litellm.BadRequestError, lambda: litellm.completion(messages=ASK, **(WHERE | {"temperature": 6})))


@check("a required tool")
def tools() -> None:
    answer = litellm.completion(messages=ASK, tools=[WEATHER], tool_choice="required", max_tokens=200, **WHERE)
    [call] = answer.choices[0].message.tool_calls
    assert "city" in json.loads(call.function.arguments)


@check(LOOP)
def loop() -> None:
    """The answers are sent back as litellm made them, with the fields that it adds."""
    settings = {key: WHERE[key] for key in ("model", "api_base", "api_key")}
    chat_loop(lambda messages: litellm.completion(messages=messages, tools=[WEATHER], **settings).choices[0].message)


@check("structured output by a JSON schema")
def structured() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema | {"additionalProperties": False}}}
    answer = litellm.completion(messages=ASK, response_format=form, logit_bias=terse(), **WHERE)
    assert isinstance(json.loads(answer.choices[0].message.content)["ok"], bool)


@undisturbed()
def texts() -> Iterator[str]:
    messages = [{"role": "user", "content": LONG}]
    for chunk in litellm.completion(messages=messages, max_tokens=150, stream=True, **WHERE):
        yield chunk.choices[0].delta.content or ""


main()
