"""The official client for Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
from checks import (
    ASK,
    BASE_URL,
    KEY,
    LONG,
    LOOP,
    MODEL,
    RESULT,
    WEATHER,
    Turn,
    chat_loop,
    check,
    main,
    refused,
    terse,
    tool_loop,
    undisturbed,
)

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=60)


def ask(**fields: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=ASK, **({"max_tokens": 24, "temperature": 0} | fields))


@check("a chat, whole")
def whole() -> None:
    answer = ask()
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content
    assert choice.finish_reason in ("stop", "length") and answer.object == "chat.completion"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens > 0


@check("a streamed chat with usage, equal to the whole one")
def streamed() -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = ask()
    assert text == whole.choices[0].message.content, text
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in chunks}) == 1


@check("the streaming helper")
def helper() -> None:
    with client.chat.completions.stream(model=MODEL, messages=ASK, max_tokens=200, temperature=0) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert "content.delta" in events and final.choices[0].message.content


@check("the asynchronous client")
async def asynchronous() -> None:
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as other:
        answer = await other.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8)
        assert answer.choices[0].message.content
        stream = await other.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


@check("n answers, repeated with the same seed")
def several() -> None:
    first, second = (ask(n=3, seed=7, temperature=2) for _ in range(2))
    assert [choice.message.content for choice in first.choices] == [choice.message.content for choice in second.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in first.choices}) > 1


@check("log probabilities and bytes")
def logprobs() -> None:
    choice = ask(logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    data = b"".join(bytes(token.bytes) for token in content)
    assert data.decode() == choice.message.content, data
    assert all(len(token.top_logprobs) == 3 and token.logprob <= 0 for token in content)


@check("stop strings and limits")
def stop() -> None:
    text = ask(max_tokens=40).choices[0].message.content
    word = text.split()[2]
    stopped = ask(max_tokens=40, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop" and stopped.message.content == text[: text.index(word)]
    assert ask(max_tokens=None, max_completion_tokens=2).choices[0].finish_reason == "length"


@check("logit_bias")
def bias() -> None:
    first = ask(logprobs=True, max_tokens=1, extra_body={"return_tokens_as_token_ids": True})
    token = first.choices[0].logprobs.content[0].token.removeprefix("token_id:")
    other = ask(logprobs=True, max_tokens=1, logit_bias={token: -100}, extra_body={"return_tokens_as_token_ids": True})
    assert other.choices[0].logprobs.content[0].token != f"token_id:{token}"


@check("predicted content, counted, which changes no answer")
def predicted() -> None:
    text = ask().choices[0].message.content
    answer = ask(prediction={"type": "content", "content": text})
    details = answer.usage.completion_tokens_details
    assert answer.choices[0].message.content == text
    assert details.accepted_prediction_tokens > 0 and details.rejected_prediction_tokens is not None, details


@check("stored chats: read, listed, relabelled, deleted")
def stored() -> None:
    answer = ask(store=True, metadata={"use": "compat"})
    chats = client.chat.completions
    assert chats.retrieve(answer.id).choices[0].message.content == answer.choices[0].message.content
    assert [message.content for message in chats.messages.list(answer.id)] == [ASK[0]["content"]]
    assert answer.id in [chat.id for chat in chats.list(metadata={"use": "compat"})]
    assert chats.update(answer.id, metadata={"use": "other"}).metadata == {"use": "other"}
    assert chats.delete(answer.id).deleted
    assert answer.id not in [chat.id for chat in chats.list()]


@check("completions: several prompts, streamed and whole")
def completions() -> None:
    prompts = ["One two", "Count to"]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=6, temperature=0)
    texts = ["", ""]
    for chunk in client.completions.create(model=MODEL, prompt=prompts, max_tokens=6, temperature=0, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


@check("completions: echo with log probabilities")
def echo() -> None:
    choice = client.completions.create(
        model=MODEL, prompt="One two three", max_tokens=0, echo=True, logprobs=1
    ).choices[0]
    logprobs = choice.logprobs
    assert choice.text == "One two three" and logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == choice.text and logprobs.text_offset[0] == 0


@check("models, listed and retrieved")
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]
    assert client.models.retrieve(MODEL).id == MODEL


@check("errors as the client's exceptions, with param and code")
def errors() -> None:
    error = refused(openai.BadRequestError, lambda: ask(temperature=6))
    assert error.param == "temperature" and error.type == "invalid_request_error"
    wrong: Any = {"model": "no-such-model", "messages": ASK}
    assert refused(openai.NotFoundError, lambda: client.chat.completions.create(**wrong)).code == "model_not_found"


@check("raw responses with the request's id")
def raw() -> None:
    response = client.chat.completions.with_raw_response.create(model=MODEL, messages=ASK, max_tokens=2)
    assert response.headers["x-request-id"] == response.parse().id.removeprefix("chatcmpl-")


@check("a required tool, whole and streamed")
def tools() -> None:
    fields = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 200}
    [call] = ask(**fields).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and "city" in json.loads(call.function.arguments)
    parts = [chunk.choices[0].delta.tool_calls for chunk in ask(stream=True, **fields) if chunk.choices]
    arguments = "".join(part.function.arguments or "" for calls in parts for part in calls or [])
    assert "city" in json.loads(arguments)


@check("tools offered, results sent back")
def results() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    history: Any = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=history, tools=[WEATHER], max_tokens=8)
    assert answer.choices[0].message.role == "assistant"


@check(f"chat: {LOOP}")
def loop() -> None:
    def ask(messages: list[Any]) -> Any:
        with client.chat.completions.stream(model=MODEL, messages=messages, tools=[WEATHER]) as stream:
            return stream.get_final_completion().choices[0].message

    chat_loop(ask)


@check(f"responses: {LOOP}")
def responses_loop() -> None:
    """The whole output is sent back, without a stored response."""
    tool: Any = {"type": "function", **WEATHER["function"]}

    def turn(items: list[Any]) -> Turn:
        answer = client.responses.create(model=MODEL, input=items, tools=[tool])
        calls = [item.call_id for item in answer.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": identity, "output": RESULT} for identity in calls]
        return answer.output, results, answer.output_text

    tool_loop(turn)


@check("structured output by a JSON schema")
def structured() -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    answer = ask(
        logit_bias=terse(),
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}},
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["ok"], bool)


@check("the responses API, whole and streamed")
def responses() -> None:
    answer = client.responses.create(model=MODEL, input="What is a poisoned replica?", max_output_tokens=16)
    assert answer.output_text and answer.usage.total_tokens
    again = client.responses.create(
        model=MODEL, input="And then?", previous_response_id=answer.id, max_output_tokens=16
    )
    assert again.previous_response_id == answer.id
    kinds = [
        event.type for event in client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, stream=True)
    ]
    assert kinds[0] == "response.created" and "response.output_text.delta" in kinds


@check("a background response, polled and resumed by number")
def background() -> None:
    stream = client.responses.create(model=MODEL, input="Hello", max_output_tokens=8, background=True, stream=True)
    began = [next(stream) for _ in range(3)]
    stream.close()
    identity: Any = began[0].response.id  # type: ignore[union-attr]
    rest = list(client.responses.retrieve(identity, stream=True, starting_after=began[-1].sequence_number))
    numbers = [event.sequence_number for event in [*began, *rest]]
    assert numbers == list(range(len(numbers))) and rest[-1].type in ("response.completed", "response.incomplete")
    assert client.responses.retrieve(identity).output_text == rest[-1].response.output_text


@check("truncation of a conversation longer than the context")
def truncated() -> None:
    history: Any = [{"role": "user", "content": "word " * 70_000}, {"role": "assistant", "content": "word " * 70_000}]
    long: Any = {"model": MODEL, "input": [*history, {"role": "user", "content": "Hello"}], "max_output_tokens": 8}
    error = refused(openai.BadRequestError, lambda: client.responses.create(**long))
    assert error.code == "context_length_exceeded"
    assert client.responses.create(**long, truncation="auto").truncation == "auto"


COUNT: Any = {"model": MODEL, "stream": True, "temperature": 0}


@undisturbed("chat")
def chat_texts() -> Iterator[str]:
    messages: Any = [{"role": "user", "content": LONG}]
    for chunk in client.chat.completions.create(messages=messages, max_tokens=150, **COUNT):
        yield chunk.choices[0].delta.content or ""


@undisturbed("completions")
def completion_texts() -> Iterator[str]:
    fields: Any = COUNT | {"prompt": LONG, "max_tokens": 150, "extra_body": {"min_tokens": 150}}
    for chunk in client.completions.create(**fields):
        yield chunk.choices[0].text


@undisturbed("responses")
def response_texts() -> Iterator[str]:
    for event in client.responses.create(input=LONG, max_output_tokens=150, **COUNT):
        if event.type == "response.output_text.delta":
            yield event.delta


main()
