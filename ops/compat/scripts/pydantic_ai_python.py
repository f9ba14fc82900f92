"""pydantic-ai, through its OpenAI chat model."""

from __future__ import annotations

import time

from checks import BASE_URL, KEY, LONG, MODEL, SILENT, check, main, pause, pausing, terse
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))


class Answer(BaseModel):
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


@check("output by a required tool")
def tool_output() -> None:
    agent = Agent(model, output_type=ToolOutput(Answer))
    assert isinstance(
        agent.run_sync("Is it so?", model_settings={"max_tokens": 200, "logit_bias": terse()}).output, Answer
    )


@check("output by a JSON schema")
def native_output() -> None:
    agent = Agent(model, output_type=NativeOutput(Answer))
    assert isinstance(
        agent.run_sync("Is it so?", model_settings={"max_tokens": 200, "logit_bias": terse()}).output, Answer
    )


@pausing(SILENT)
async def silent() -> None:
    async def ask(disturbing: bool) -> str:
        said, paused_at = "", None
        settings = {"max_tokens": 150, "temperature": 0}
        async with Agent(model).run_stream(LONG, model_settings=settings) as result:
            async for part in result.stream_text(delta=True, debounce_by=None):
                said += part
                if disturbing and paused_at is None and len(said) > 5:
                    paused_at = pause()
        assert not disturbing or (paused_at is not None and time.monotonic() - paused_at > 0.5), said
        return said

    assert await ask(True) == await ask(False)


main()
