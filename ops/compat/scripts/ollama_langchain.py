"""LangChain with `ChatOllama`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pydantic
from checks import BASE_URL, KEY, LONG, LOOP, MODEL, ROUNDS, TURNS, check, main, undisturbed
from langchain_core.messages import BaseMessage, HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaLLM


def model_of(limit: int = 24, kind: Any = ChatOllama, **fields: Any) -> Any:
    return kind(
        model=MODEL,
        base_url=BASE_URL.removesuffix("/v1"),
        client_kwargs={"headers": {"authorization": f"Bearer {KEY}"}},
        **{"temperature": 0, "num_predict": limit} | fields,
    )


@check("an answer, streamed and whole, with its usage")
def answer() -> None:
    model = model_of(validate_model_on_init=True)
    whole = model.invoke("What is a poisoned replica?")
    assert whole.content == "".join(chunk.content for chunk in model.stream("What is a poisoned replica?"))
    usage = whole.usage_metadata
    assert usage["input_tokens"] > 0 and 0 < usage["output_tokens"] <= 24
    assert whole.response_metadata["done_reason"] in ("stop", "length")


@check("the asynchronous model, in a batch")
async def asynchronous() -> None:
    answers = await model_of().abatch(["What is a poisoned replica?"] * 3)
    assert len({one.content for one in answers}) == 1


@check("a prompt of the completion model")
def completion() -> None:
    assert model_of(kind=OllamaLLM).invoke("What is a poisoned replica?")


@check("structured output")
def structured() -> None:
    class Reading(pydantic.BaseModel):
        state: Literal["healthy", "poisoned"]
        ranks: int

    model = model_of(200).with_structured_output(Reading, method="json_schema")
    assert isinstance(model.invoke("What is a poisoned replica?"), Reading)


@check(LOOP)
def loop() -> None:
    """The answers are sent back as LangChain made them."""

    def get_weather(city: str) -> str:
        """The weather in a city."""
        return "sunny"

    model = ChatOllama(
        model=MODEL,
        base_url=BASE_URL.removesuffix("/v1"),
        client_kwargs={"headers": {"authorization": f"Bearer {KEY}"}},
    ).bind_tools([get_weather])
    said: list[BaseMessage] = []
    for turn in TURNS:
        said.append(HumanMessage(turn))
        for _ in range(ROUNDS):
            answer = model.invoke(said)
            said.append(answer)
            said += [ToolMessage(get_weather(**call["args"]), tool_call_id=call["id"]) for call in answer.tool_calls]
            if not answer.tool_calls:
                break
        assert answer.content, said
    assert any(isinstance(message, ToolMessage) for message in said), said


@undisturbed()
def texts() -> Iterator[str]:
    for chunk in model_of(150).stream(LONG):
        yield str(chunk.content)


@undisturbed("asynchronous")
async def later() -> AsyncIterator[str]:
    async for chunk in model_of(150).astream(LONG):
        yield str(chunk.content)


main()
