"""Structured output reaches the leader or is refused: as clients ask for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import httpx
import msgspec
import openai
import pytest
from pydantic import BaseModel

from control.messages import Grammar, ModelAssets
from tests.byte_model import byte_assets, byte_tokenizer
from tests.integration.api.conftest import ApiProcess
from tests.integration.api.sse import chat
from tests.leader import ScriptedLeader
from tests.servers import Server

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Person(BaseModel):
    name: str
    age: int
    colour: Literal["red", "green"]


def test_the_official_client_parses_a_model(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """`parse` sends a strict schema of a pydantic model; the leader gets it as it is, the caller an object."""
    leader.reply = lambda prompt: '{"name": "Ada", "age": 36, "colour": "red"}'
    answer = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "who?"}], response_format=Person
    )
    assert answer.choices[0].message.parsed == Person(name="Ada", age=36, colour="red")
    grammar = leader.claimed[0].params.sampling.grammar
    assert grammar is not None and grammar.kind == "json_schema"
    schema = msgspec.json.decode(grammar.text)
    assert schema["additionalProperties"] is False and "x-guidance" not in schema


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"guided_regex": "[0-9]+"}, Grammar("regex", "[0-9]+")),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar("choice", '["yes","no"]')),
        ({"guided_grammar": "start: <s> </s>"}, Grammar("lark", "start: <s> </s>")),
        ({"grammar": 'root ::= "a"'}, Grammar("lark", '%llguidance {}\n\nstart: "a"\n')),
    ],
)
def test_completions_take_them_too(
    http: httpx.Client, leader: ScriptedLeader, fields: dict[str, Any], grammar: Grammar
) -> None:
    """Every prompt of the list is constrained; llama.cpp's notation is written as Lark."""
    answer = http.post(COMPLETIONS, json={"model": "tiny", "prompt": ["a", "b"], **fields})
    assert answer.status_code == 200, answer.text
    assert [claimed.params.sampling.grammar for claimed in leader.claimed] == [grammar, grammar]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_json": {"type": "strin"}}, "guided_json", "Invalid type: strin"),
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"$ref": "http://127.0.0.1:1/x"}}, "guided_json", "does not fetch"),
        ({"guided_json": {"type": "integer", "multipleOf": 1_000_003}}, "guided_json", "takes longer"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        ({"guided_grammar": "start: <nope>"}, "guided_grammar", "unknown special token"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "'guided_regex' and 'guided_choice'"),
    ],
)
def test_a_bad_grammar_is_refused(
    http: httpx.Client, leader: ScriptedLeader, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    """A 400 that names the parameter and has the library's words; nothing reaches a leader."""
    body = chat("x") if path == CHAT else {"model": "tiny", "prompt": "x"}
    answer = http.post(path, json=body | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param) and words in error["message"]
    assert leader.claimed == []


REASONING = "{% for message in messages %}{{ message.content }}{% endfor %}<think>\n"


def reasoning_assets(markers: list[str]) -> ModelAssets:
    """A model whose prompts begin with reasoning, and whose vocabulary has these markers."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(markers)
    return byte_assets(
        chat_template=REASONING, tokenizer_json=tokenizer.to_str(), vocab_size=tokenizer.get_vocab_size()
    )


@pytest.fixture
def reasoner(server: Server, leader: ScriptedLeader) -> Iterator[ScriptedLeader]:
    """A second model beside the first."""
    reasoner = ScriptedLeader(server.url, "reasoner", reasoning_assets(["<think>", "</think>"]))
    reasoner.start()
    yield reasoner
    reasoner.stop()


def test_a_grammar_begins_behind_the_reasoning(client: openai.OpenAI, reasoner: ScriptedLeader) -> None:
    """Where the prompt has begun to reason, the model may end that first; the text is the grammar's alone."""
    reasoner.reply = lambda prompt: 'so it is</think>{"a": 1}'
    answer = client.chat.completions.create(
        model="reasoner",
        messages=[{"role": "user", "content": "x"}],
        response_format={"type": "json_object"},
    )
    [claimed] = reasoner.claimed
    grammar = claimed.params.sampling.grammar
    assert grammar is not None and f"<[{reasoner.tokenizer.token_to_id('</think>')}]>" in grammar.text
    assert answer.choices[0].message.content == '{"a": 1}'
    assert answer.choices[0].message.model_extra is not None
    assert answer.choices[0].message.model_extra["reasoning_content"] == "so it is"


@pytest.mark.parametrize(("tokens", "limit"), [(7, 7), (0, 0), (-1, None)])
def test_a_reasoning_gets_its_budget(
    client: openai.OpenAI, reasoner: ScriptedLeader, tokens: int, limit: int | None
) -> None:
    """The leader is told the limit, the marks as tokens, and that the prompt has opened them; -1 is no limit."""
    reasoner.reply = lambda prompt: "so it is</think>yes"
    client.chat.completions.create(
        model="reasoner",
        messages=[{"role": "user", "content": "x"}],
        extra_body={"thinking_token_budget": tokens},
    )
    [claimed] = reasoner.claimed
    budget = claimed.params.sampling.reasoning
    assert (budget.tokens if budget is not None else None) == limit
    if budget is not None:
        assert (budget.begun, budget.closing) == (True, [reasoner.tokenizer.token_to_id("</think>")])


@pytest.mark.parametrize("name", ["thinking_token_budget", "thinking_budget", "thinking_budget_tokens"])
def test_a_budget_under_its_neighbours_names(reasoner: ScriptedLeader, api: ApiProcess, name: str) -> None:
    """Of chat and of responses."""
    reasoner.reply = lambda prompt: "so it is</think>yes"
    for path, prompt in (
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("responses", {"input": "x"}),
    ):
        answer = httpx.post(f"{api.url}/v1/{path}", json={"model": "reasoner", name: 7} | prompt)
        assert answer.status_code == 200 and "warning" not in answer.headers
        budget = reasoner.claimed[-1].params.sampling.reasoning
        assert budget is not None and budget.tokens == 7


def test_a_budget_of_messages(server: Server, reasoner: ScriptedLeader, api: ApiProcess) -> None:
    """Anthropic's `thinking.budget_tokens` is the same limit; without `enabled` it is none."""
    reasoner.reply = lambda prompt: "so it is</think>yes"
    for kind, limit in (("enabled", 1024), ("disabled", None)):
        body = {"model": "reasoner", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}]}
        body["thinking"] = {"type": kind, "budget_tokens": 1024}
        assert httpx.post(f"{api.url}/v1/messages", json=body).status_code == 200
        budget = reasoner.claimed[-1].params.sampling.reasoning
        assert (budget.tokens if budget is not None else None) == limit


def test_a_budget_is_a_hint_without_marks(client: openai.OpenAI, leader: ScriptedLeader) -> None:
    """A model that has no reasoning in marks answers as without it; a wrong number is refused."""
    ask: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    client.chat.completions.create(**ask, extra_body={"thinking_token_budget": 3})
    assert leader.claimed[0].params.sampling.reasoning is None
    with pytest.raises(openai.BadRequestError, match="'thinking_token_budget': -2 must be between -1"):
        client.chat.completions.create(**ask, extra_body={"thinking_token_budget": -2})
