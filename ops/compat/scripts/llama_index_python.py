"""LlamaIndex, through `OpenAILike`."""

from __future__ import annotations

from collections.abc import Iterator

from checks import BASE_URL, KEY, LONG, LOOP, MODEL, TURNS, check, main, terse, undisturbed
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.workflow import Context
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

ASK = [ChatMessage(role="user", content="What is a poisoned replica?")]


class Verdict(BaseModel):
    ok: bool


def llm(**fields: object) -> OpenAILike:
    settings = {"is_chat_model": True, "max_tokens": 24, "temperature": 0.0, "max_retries": 0} | fields
    return OpenAILike(model=MODEL, api_base=BASE_URL, api_key=KEY, context_window=8192, **settings)


@check("a chat, whole and streamed")
def chat() -> None:
    whole = llm().chat(ASK).message.content
    streamed = "".join(part.delta or "" for part in llm().stream_chat(ASK))
    assert whole == streamed and whole


@check("a completion, whole and streamed")
def completion() -> None:
    plain = llm(is_chat_model=False)
    whole = plain.complete("One two three").text
    assert whole == "".join(part.delta or "" for part in plain.stream_complete("One two three")) and whole


@check("the asynchronous chat")
async def asynchronous() -> None:
    assert (await llm().achat(ASK)).message.content


@check(LOOP)
async def loop() -> None:
    """An agent's workflow, with the context of its first turn."""
    cities: list[str] = []

    def get_weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return "sunny"

    able = OpenAILike(model=MODEL, api_base=BASE_URL, api_key=KEY, is_chat_model=True, is_function_calling_model=True)
    agent = FunctionAgent(tools=[get_weather], llm=able)
    context = Context(agent)
    for turn in TURNS:
        assert str(await agent.run(turn, ctx=context))
    assert cities


@check("an object by a required tool")
def structured() -> None:
    able = llm(is_function_calling_model=True, max_tokens=200, additional_kwargs={"logit_bias": terse()})
    assert isinstance(able.as_structured_llm(Verdict).complete("Is it so?").raw, Verdict)


@undisturbed()
def texts() -> Iterator[str]:
    for part in llm(max_tokens=150).stream_chat([ChatMessage(role="user", content=LONG)]):
        yield part.delta or ""


main()
