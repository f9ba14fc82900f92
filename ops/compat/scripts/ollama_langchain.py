"""LangChain with `ChatOllama`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import pydantic
from checks import BASE_URL, KEY, LONG, LOOP, MODEL, check, langchain_loop, main, undisturbed
from langchain_ollama import ChatOllama, OllamaLLM

WHERE: Any = {
    "model": MODEL,
    "base_url": BASE_URL.removesuffix("/v1"),
    "client_kwargs": {"headers": {"authorization": f"Bearer {KEY}"}},
}


def model_of(limit: int = 24, kind: Any = ChatOllama, **fields: Any) -> Any:
    return kind(**WHERE, **{"temperature": 0, "num_predict": limit} | fields)


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
    assert len({message.content for message in answers}) == 1


@check("a prompt of the completion model")
def completion() -> None:
    assert model_of(kind=OllamaLLM).invoke("What is a poisoned replica?")


@check("structured output")
def structured() -> None:
    class ReplicaState(pydantic.BaseModel):
        state: Literal["healthy", "poisoned"]
        ranks: int

    model = model_of(200).with_structured_output(ReplicaState, method="json_schema")
    assert isinstance(model.invoke("What is a poisoned replica?"), ReplicaState)


@check(LOOP)
def loop() -> None:
    langchain_loop(ChatOllama(**WHERE))


@undisturbed()
def texts() -> Iterator[str]:
    for chunk in model_of(150).stream(LONG):
        yield str(chunk.content)


@undisturbed("asynchronous")
async def later() -> AsyncIterator[str]:
    async for chunk in model_of(150).astream(LONG):
        yield str(chunk.content)


main()
