"""OpenAI's Agents SDK: a tool, a handoff and a stream, on Responses (its default) and on chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import agents
from agents import Agent, ModelSettings, Runner, function_tool
from checks import BASE_URL, KEY, LONG, LOOP, MODEL, ORDERED, SCRIPTED_URL, TURNS, check, main, order, undisturbed
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
cities: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    cities.append(city)
    return "sunny"


def responses(url: str = BASE_URL) -> agents.Model:
    """With a client of its own, as each check has a loop of its own."""
    return agents.OpenAIResponsesModel(MODEL, AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0))


def chat(url: str = BASE_URL) -> agents.Model:
    return agents.OpenAIChatCompletionsModel(MODEL, AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0))


def agent(model: agents.Model, **fields: Any) -> Agent:
    return Agent(name="Helper", instructions="You are a helpful assistant.", model=model, **fields)


for name, model in (("responses", responses), ("chat", chat)):

    @check(f"{name}: {LOOP}")
    async def loop(model: Any = model) -> None:
        cities.clear()
        helper = agent(model(), tools=[get_weather])
        items = []
        for turn in TURNS:
            result = await Runner.run(helper, [*items, {"role": "user", "content": turn}], max_turns=4)
            assert result.final_output, result
            items = result.to_input_list()
        assert cities

    @check(f"{name}: a streamed tool loop")
    async def streamed(model: Any = model) -> None:
        result = Runner.run_streamed(agent(model(), tools=[get_weather]), TURNS[0], max_turns=4)
        kinds = [event.item.type async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert kinds[:2] == ["tool_call_item", "tool_call_output_item"], kinds
        assert result.final_output

    @check(f"{name}: a handoff")
    async def handoff(model: Any = model) -> None:
        """Greedily, as the demonstration model does not end every sampled answer."""
        greedy = ModelSettings(temperature=0)
        other = Agent(name="Other", instructions="You are brief.", model=model(), model_settings=greedy)
        forced = ModelSettings(tool_choice="required", temperature=0)
        result = await Runner.run(agent(model(), handoffs=[other], model_settings=forced), "Hello", max_turns=3)
        assert result.last_agent.name == "Other" and result.final_output

    @check(f"{name}: {ORDERED}")
    async def ordered(model: Any = model) -> None:
        assert SCRIPTED_URL, "it needs the farm whose model takes orders"
        cities.clear()
        helper = agent(model(SCRIPTED_URL), tools=[get_weather])
        call = order(call={"name": "get_weather", "arguments": {"city": "Zürich"}}, then="It is sunny.")
        result = await Runner.run(helper, f"Ask for the weather. {call}", max_turns=3)
        assert cities == ["Zürich"], cities
        assert result.final_output == "It is sunny.", result.final_output
        items = [*result.to_input_list(), {"role": "user", "content": f"Thanks. {order(say='You are welcome.')}"}]
        streamed = Runner.run_streamed(helper, items, max_turns=2)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == "You are welcome.", streamed.final_output

    @undisturbed(name)
    async def texts(model: Any = model) -> AsyncIterator[str]:
        settings = ModelSettings(temperature=0, max_tokens=1000)
        result = Runner.run_streamed(agent(model(), model_settings=settings), LONG)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                yield event.data.delta


main()
