"""Requests of programs built on LangChain and pydantic-ai; run by an interpreter that has them, with the API's URL.

Prints one line of JSON for each case: its name, and the error that it met or null.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

import anthropic
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
CASES: dict[str, Callable[[], None]] = {}


class City(BaseModel):
    city: str


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"cold in {city}"


def case(name: str, check: Callable[[Any], None], subject: Any) -> None:
    CASES[name] = lambda: check(subject)


# --- LangChain ---


def invokes(model: Any) -> None:
    assert model.invoke("hello").text == "you said hello"
    assert model.invoke("hello").usage_metadata["output_tokens"] > 0


def streams(model: Any) -> None:
    whole: Any = None
    for chunk in model.stream("hello"):
        whole = chunk if whole is None else whole + chunk
    assert whole.text == "you said hello"


def calls(model: Any) -> None:
    bound = model.bind_tools([get_weather])
    asked = [HumanMessage("call a tool")]
    whole: Any = None
    for chunk in bound.stream(asked):
        whole = chunk if whole is None else whole + chunk
    for answer in (bound.invoke(asked), whole):
        [call] = answer.tool_calls
        assert (call["name"], call["args"]) == ("get_weather", {"city": "Oslo"})
        result = ToolMessage("cold", tool_call_id=call["id"])
        assert bound.invoke([*asked, answer, result]).text == "It is cold."


def structures(model: Any) -> None:
    assert model.with_structured_output(City, method="json_schema").invoke("json") == City(city="Oslo")


def thinks(model: Any) -> None:
    assert "Hm." in str(model.invoke("think").content)


openai_told: dict[str, Any] = {"model": "tiny", "base_url": f"{URL}/v1", "api_key": "k", "max_retries": 0}
claude_told: dict[str, Any] = {"model": "tiny", "base_url": URL, "api_key": "k", "max_retries": 0, "max_tokens": 2000}
LANGCHAIN: dict[str, Any] = {
    "chat": ChatOpenAI(**openai_told),
    "responses": ChatOpenAI(**openai_told, use_responses_api=True),
    "messages": ChatAnthropic(**claude_told),
}
for kind, subject in LANGCHAIN.items():
    for check in (invokes, streams, calls):
        case(f"langchain-{kind}-{check.__name__}", check, subject)
case("langchain-chat-structures", structures, LANGCHAIN["chat"])
case("langchain-responses-structures", structures, LANGCHAIN["responses"])
case("langchain-responses-thinks", thinks, ChatOpenAI(**openai_told, reasoning={"summary": "auto"}))
budget = {"type": "enabled", "budget_tokens": 1024}
case("langchain-messages-thinks", thinks, ChatAnthropic(**claude_told, thinking=budget))


# --- pydantic-ai ---


def runs(model: Any) -> None:
    assert Agent(model).run_sync("hello").output == "you said hello"


def runs_tools(model: Any) -> None:
    agent = Agent(model)
    agent.tool_plain(lambda city: f"cold in {city}", name="get_weather")
    assert agent.run_sync("call a tool").output == "It is cold."


def runs_streams(model: Any) -> None:
    async def run() -> str:
        async with Agent(model).run_stream("hello") as answer:
            return "".join([text async for text in answer.stream_text(delta=True)])

    assert asyncio.run(run()) == "you said hello"


# Each model is made anew: its connections belong to the event loop of one run.


def chat_model() -> Any:
    return OpenAIChatModel("tiny", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="k"))


def responses_model() -> Any:
    return OpenAIResponsesModel("tiny", provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="k"))


def messages_model() -> Any:
    claude = anthropic.AsyncAnthropic(base_url=URL, api_key="k")
    return AnthropicModel("tiny", provider=AnthropicProvider(anthropic_client=claude))


for make in (chat_model, responses_model, messages_model):
    for check in (runs, runs_tools, runs_streams):
        case(f"pydantic-ai-{make.__name__}-{check.__name__}", lambda make, check=check: check(make()), make)


for name, run in CASES.items():
    try:
        run()
        met = None
    except Exception as error:
        met = f"{type(error).__name__}: {error}"[:500]
    print(json.dumps({"case": name, "error": met}), flush=True)
