"""Ollama's official client for Python."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import ollama
import pydantic
from checks import ASK, BASE_URL, KEY, LONG, LOOP, MODEL, RESULT, Turn, check, main, refused, tool_loop, undisturbed

HOST = BASE_URL.removesuffix("/v1")
HEADERS = {"authorization": f"Bearer {KEY}"}
client = ollama.Client(HOST, headers=HEADERS, timeout=60)
SHORT = {"temperature": 0, "num_predict": 24}


@check("a chat, whole, with counts and durations")
def whole() -> None:
    answer = client.chat(MODEL, ASK, options=SHORT)
    assert answer.done and answer.message.role == "assistant" and answer.message.content
    assert answer.prompt_eval_count and 0 < (answer.eval_count or 0) <= 24
    parts = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert sum(part or 0 for part in parts) == answer.total_duration


@check("a streamed chat, equal to the whole one")
def streamed() -> None:
    parts = list(client.chat(MODEL, ASK, options=SHORT, stream=True))
    answer = client.chat(MODEL, ASK, options=SHORT)
    assert "".join(part.message.content or "" for part in parts) == answer.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == answer.eval_count


@check("a prompt, streamed and whole, raw and with a system message")
def prompts() -> None:
    question = "What is a poisoned replica?"
    answer = client.generate(MODEL, question, options=SHORT)
    assert answer.response == client.chat(MODEL, ASK, options=SHORT).message.content
    assert answer.response == "".join(
        part.response or "" for part in client.generate(MODEL, question, options=SHORT, stream=True)
    )
    assert client.generate(MODEL, question, system="You are brief.", options=SHORT).response
    assert client.generate(MODEL, question, raw=True, options=SHORT).done


@check("the asynchronous client")
async def asynchronous() -> None:
    other = ollama.AsyncClient(HOST, headers=HEADERS, timeout=60)
    answers = await asyncio.gather(*(other.chat(MODEL, ASK, options=SHORT) for _ in range(3)))
    assert len({answer.message.content for answer in answers}) == 1


@check("limits, stop strings and seeds")
def options() -> None:
    assert client.chat(MODEL, ASK, options={"num_predict": 2}).done_reason == "length"
    text = client.chat(MODEL, ASK, options=SHORT).message.content or ""
    word = text.split()[2]
    cut = client.chat(MODEL, ASK, options=SHORT | {"stop": [word]})
    assert cut.done_reason == "stop" and word not in (cut.message.content or "")
    warm: Any = {"temperature": 1.5, "seed": 7, "num_predict": 24, "num_ctx": 4096}
    assert len({client.chat(MODEL, ASK, options=warm).message.content for _ in range(2)}) == 1


@check("structured output")
def structured() -> None:
    class ReplicaState(pydantic.BaseModel):
        state: Literal["healthy", "poisoned"]
        ranks: int

    answer = client.chat(MODEL, ASK, format=ReplicaState.model_json_schema(), options={"temperature": 0})
    ReplicaState.model_validate_json(answer.message.content or "")


@check("log probabilities")
def scores() -> None:
    answer = client.chat(MODEL, ASK, logprobs=True, top_logprobs=2, options=SHORT)
    assert answer.logprobs and all(len(token.top_logprobs or []) == 2 for token in answer.logprobs)


@check("errors as the client's exceptions")
def errors() -> None:
    for model, messages, status in (("no-such-model", ASK, 404), (MODEL, [{"role": "wizard", "content": "x"}], 400)):
        for stream in (False, True):
            wrong: Any = {"model": model, "messages": messages, "stream": stream}
            error = refused(ollama.ResponseError, lambda wrong=wrong: list(client.chat(**wrong)))
            assert error.status_code == status and error.error


@check("models: listed, shown, running")
def models() -> None:
    assert MODEL in [model.model for model in client.list().models]
    shown = client.show(MODEL)
    assert "completion" in (shown.capabilities or []) and shown.modelinfo
    assert MODEL in [model.model for model in client.ps().models]
    assert client.generate(MODEL, keep_alive="10m").done_reason == "load"


@check("a model that is loaded is pulled at once")
def pull() -> None:
    assert client.pull(MODEL).status == "success"
    assert [part.status for part in client.pull(f"{MODEL}:latest", stream=True)][-1] == "success"


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: The name of the city.
    """
    return RESULT


@check(LOOP)
def loop() -> None:
    """The answers are sent back as the client made them, without ids."""

    def turn(messages: list[Any]) -> Turn:
        answer = client.chat(MODEL, messages, tools=[get_weather]).message
        calls = [call.function for call in answer.tool_calls or []]
        results = [{"role": "tool", "tool_name": call.name, "content": get_weather(**call.arguments)} for call in calls]
        return [answer], results, answer.content

    tool_loop(turn)


@undisturbed("chat")
def chat_texts() -> Iterator[str]:
    messages: Any = [{"role": "user", "content": LONG}]
    for part in client.chat(MODEL, messages, options={"temperature": 0, "num_predict": 150}, stream=True):
        yield part.message.content or ""


@undisturbed("generate, asynchronous")
async def generate_texts() -> AsyncIterator[str]:
    other = ollama.AsyncClient(HOST, headers=HEADERS, timeout=60)
    options = {"temperature": 0, "num_predict": 150}
    async for part in await other.generate(MODEL, LONG, options=options, stream=True):
        yield part.response or ""


main()
