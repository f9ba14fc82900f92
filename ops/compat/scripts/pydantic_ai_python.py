"""pydantic-ai, through its OpenAI chat model."""

from __future__ import annotations

from collections.abc import AsyncIterator

from checks import BASE_URL, KEY, LONG, LOOP, MODEL, TURNS, check, main, terse, undisturbed
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))


class Verdict(BaseModel):
    ok: bool


@check("an agent's run, whole")
def whole() -> None:
    result = Agent(model, instructions="Be brief.").run_sync(
        "What is a poisoned replica?", model_settings={"max_tokens": 24}
    )
    assert result.output and result.usage.total_tokens > 0


@check("an agent's run, streamed")
async def streamed() -> None:
    async with Agent(model).run_stream("What is a poisoned replica?", model_settings={"max_tokens": 24}) as result:
        parts = [part async for part in result.stream_text(delta=True)]
    assert "".join(parts)


@check("a second turn")
def history() -> None:
    agent = Agent(model)
    first = agent.run_sync("What is a poisoned replica?", model_settings={"max_tokens": 16})
    second = agent.run_sync("And then?", message_history=first.all_messages(), model_settings={"max_tokens": 16})
    assert len(second.all_messages()) == 4


@check(LOOP)
def loop() -> None:
    cities: list[str] = []

    def get_weather(city: str) -> str:
        """The weather in a city."""
        cities.append(city)
        return "sunny"

    agent = Agent(model, tools=[get_weather])
    first = agent.run_sync(TURNS[0])
    second = agent.run_sync(TURNS[1], message_history=first.all_messages())
    assert cities and first.output and second.output


@check("output by a required tool")
def tool_output() -> None:
    agent = Agent(model, output_type=ToolOutput(Verdict))
    assert isinstance(
        agent.run_sync("Is it so?", model_settings={"max_tokens": 200, "logit_bias": terse()}).output, Verdict
    )


@check("output by a JSON schema")
def native_output() -> None:
    agent = Agent(model, output_type=NativeOutput(Verdict))
    assert isinstance(
        agent.run_sync("Is it so?", model_settings={"max_tokens": 200, "logit_bias": terse()}).output, Verdict
    )


@undisturbed()
async def texts() -> AsyncIterator[str]:
    settings = {"max_tokens": 150, "temperature": 0}
    async with Agent(model).run_stream(LONG, model_settings=settings) as result:
        async for part in result.stream_text(delta=True, debounce_by=None):
            yield part


main()
