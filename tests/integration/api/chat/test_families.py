"""Agents' turns work with three families in three dialects: calls, reasoning, and what is sent back.

The templates are those of the scripted model: short ones with the marks of the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from ops.compat.scripted import TEMPLATES
from tests.byte_model import byte_assets, byte_tokenizer
from tests.integration.api.calling import TIME, WEATHER
from tests.integration.api.conftest import running_api
from tests.integration.api.sse import events
from tests.leader import ScriptedLeader
from tests.servers import Server

HARMONY, MISTRAL, GLM = (
    (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8") for name in ("harmony", "mistral_ids", "glm")
)


@dataclass(frozen=True)
class Family:
    template: str
    tokens: list[str]
    reply: str
    """Reasoning, text and a call."""
    final: str
    sent_back: str
    """What the second prompt has of the first answer."""


ARGUMENTS = {"city": "Zürich", "days": 2}
FAMILIES = {
    "harmony": Family(
        HARMONY,
        ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"],
        "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
        "<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        '{"city": "Zürich", "days": 2}<|call|>',
        "<|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>It rains.",
        "<|channel|>analysis<|message|>I think.\n\nI look.<|end|><|start|>assistant to=functions.get_weather<|channel|>"
        'commentary json<|message|>{"city": "Zürich", "days": 2}<|call|>',
    ),
    "mistral": Family(
        MISTRAL,
        ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]", "[TOOL_RESULTS]"],
        '[THINK]I think.[/THINK]I look.[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{"city": "Zürich", "days": 2}',
        "[THINK]I see.[/THINK]It rains.",
        "[THINK]I think.[/THINK]I look.[TOOL_CALLS]get_weather[CALL_ID]",
    ),
    "glm": Family(
        GLM,
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        "<think>I think.</think>\nI look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich"
        "</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "<think>I see.</think>\nIt rains.",
        "<think>I think.</think>I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich",
    ),
}


@dataclass
class Scene:
    leader: ScriptedLeader
    http: httpx.Client
    family: Family
    model: str

    def prompts(self) -> list[str]:
        """Of all requests, control tokens written out."""
        decode = self.leader.tokenizer.decode
        return [decode(held.params.prompt, skip_special_tokens=False) for held in self.leader.claimed]

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json={"model": self.model} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def farm(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Scene]]:
    with ExitStack() as stack:
        leaders: dict[str, ScriptedLeader] = {}
        for name, family in FAMILIES.items():
            tokenizer = byte_tokenizer()
            tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in family.tokens])
            assets = byte_assets(
                tokenizer_json=tokenizer.to_str(),
                chat_template=family.template,
                vocab_size=tokenizer.get_vocab_size(),
            )
            leaders[name] = ScriptedLeader(server.url, name, assets)
            leaders[name].start()
            stack.callback(leaders[name].stop)
        api = stack.enter_context(running_api(server.url, tmp_path_factory.mktemp("api")))
        http = stack.enter_context(httpx.Client(base_url=api.url, timeout=40))
        yield {name: Scene(leaders[name], http, family, name) for name, family in FAMILIES.items()}


@pytest.fixture(params=list(FAMILIES))
def scene(farm: dict[str, Scene], request: pytest.FixtureRequest) -> Iterator[Scene]:
    scene = farm[request.param]
    scene.leader.reset()
    family = scene.family
    scene.leader.reply = lambda prompt: family.final if "rain" in prompt else family.reply
    yield scene
    scene.leader.reset()


USER = {"role": "user", "content": "How is it?"}


def test_a_loop_in_chat_completions(scene: Scene) -> None:
    """Reasoning, text and call are told apart; sent back, the template writes them as the model did."""
    body = {"messages": [USER], "tools": [WEATHER, TIME]}
    choice = scene.post("/v1/chat/completions", **body)["choices"][0]
    message = choice["message"]
    assert (message["reasoning_content"], message["content"], choice["finish_reason"]) == (
        "I think.",
        "I look.",
        "tool_calls",
    )
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", ARGUMENTS)
    assert scene.model != "mistral" or (len(call["id"]) == 9 and call["id"].isalnum())
    for call_id in (call["id"], "call_of_another_server"):
        calls = [call | {"id": call_id}]
        history = [USER, message | {"tool_calls": calls}, {"role": "tool", "tool_call_id": call_id, "content": "rain"}]
        answer = scene.post("/v1/chat/completions", messages=history, tools=[WEATHER, TIME])["choices"][0]
        assert (answer["message"]["reasoning_content"], answer["message"]["content"]) == ("I see.", "It rains.")
        assert scene.family.sent_back in scene.prompts()[-1]


def test_a_streamed_answer_is_the_same(scene: Scene) -> None:
    """Name and arguments come as they are written, and no mark is in the text."""
    body = {"model": scene.model, "messages": [USER], "tools": [WEATHER], "stream": True}
    text = reasoning = arguments = ""
    names: list[str] = []
    with scene.http.stream("POST", "/v1/chat/completions", json=body) as response:
        for event in events(response.iter_lines()):
            if event.done:
                break
            for choice in event.data["choices"]:
                delta = choice["delta"]
                text += delta.get("content") or ""
                reasoning += delta.get("reasoning_content") or ""
                for call in delta.get("tool_calls") or []:
                    names += [call["function"]["name"]] if call["function"].get("name") else []
                    arguments += call["function"].get("arguments") or ""
    assert (text, reasoning, names, json.loads(arguments)) == ("I look.", "I think.", ["get_weather"], ARGUMENTS)


def test_a_loop_in_responses(scene: Scene) -> None:
    """Items of reasoning, message and call; with their results they are the next input."""
    function = WEATHER["function"]
    tools = [{"type": "function", "name": function["name"], "parameters": function["parameters"]}]
    answer = scene.post("/v1/responses", input=[USER], tools=tools)
    kinds = [item["type"] for item in answer["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    call = answer["output"][-1]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", ARGUMENTS)
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    answer = scene.post("/v1/responses", input=[USER, *answer["output"], result], tools=tools)
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["output"][1]["content"][0]["text"] == "It rains."
    assert scene.family.sent_back in scene.prompts()[-1]


def test_a_loop_in_messages(scene: Scene) -> None:
    """Blocks of thinking, text and tool_use; with their results they are the next message."""
    function = WEATHER["function"]
    tools = [{"name": function["name"], "input_schema": function["parameters"]}]
    fields: dict[str, Any] = {"max_tokens": 300, "tools": tools, "thinking": {"type": "enabled", "budget_tokens": 200}}
    answer = scene.post("/v1/messages", messages=[USER], **fields)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][2]["input"] == ARGUMENTS and answer["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": answer["content"][2]["id"], "content": "rain"}
    history = [USER, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": [result]}]
    answer = scene.post("/v1/messages", messages=history, **fields)
    assert [block.get("text") for block in answer["content"]][-1] == "It rains."
    assert scene.family.sent_back in scene.prompts()[-1]


def test_what_is_demanded_is_constrained_in_the_family_s_form(scene: Scene) -> None:
    """The grammar of a demanded call, and of a format, has the family's marks as tokens."""
    token = scene.leader.tokenizer.token_to_id
    mark = {"harmony": "<|channel|>", "mistral": "[TOOL_CALLS]", "glm": "<tool_call>"}[scene.model]
    scene.post("/v1/chat/completions", messages=[USER], tools=[WEATHER], tool_choice="required")
    grammar = scene.leader.claimed[-1].params.sampling.grammar
    assert grammar is not None and f"<[{token(mark)}]>" in grammar.text and "get_weather" in grammar.text
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    scene.post("/v1/chat/completions", messages=[USER], response_format=schema)
    grammar = scene.leader.claimed[-1].params.sampling.grammar
    assert grammar is not None
    assert scene.model != "harmony" or f'<[{token("<|channel|>")}]> "final" <[{token("<|message|>")}]>' in grammar.text
