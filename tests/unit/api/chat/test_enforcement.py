"""The grammar of demanded calls fits the model's form; and takes nothing else."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import msgspec
import pytest
from tokenizers import AddedToken

from api.chat.enforcement import answer_grammar
from api.chat.tokens import Vocabulary
from api.schemas.chat import Tool, ToolChoice, offered
from api.schemas.response_tools import read_tools
from api.schemas.view import CallFormat, ThinkingMarks
from control.messages import Grammar
from control.text.grammar import as_lark
from tests.byte_model import EOS, byte_assets, byte_tokenizer
from tests.integration.api.calling import TIME, WEATHER

PLAIN = byte_tokenizer()
MARKED = byte_tokenizer()
MARKED.add_tokens([AddedToken(text, special=False) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")])

PARIS = '{"city": "Paris", "days": 2}'
HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
MORE = HERMES.replace(PARIS, PARIS[:-1] + ', "made_up": 1}')
HERMES_TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'
XML = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nPa\nris\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)


def grammar(tokenizer: Any, form: CallFormat, choice: ToolChoice, strict: bool = False, **options: Any) -> str | None:
    tools = [msgspec.convert(tool, Tool) for tool in (WEATHER, TIME)]
    for tool in tools:
        assert tool.function is not None
        tool.function.strict = strict
    offer = offered(tools, choice, options.get("parallel"))
    assert offer is not None
    vocabulary = Vocabulary(byte_assets(tokenizer_json=tokenizer.to_str()))
    return answer_grammar(offer, form, options.get("thinking"), vocabulary)


def takes(tokenizer: Any, text: str | None, said: str) -> bool:
    """True if an answer may be exactly this."""
    assert text is not None
    known = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=tokenizer.token_to_id(EOS))
    matcher = llguidance.LLMatcher(known, llguidance.grammar_from("lark", text))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(said, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "tokens"])
@pytest.mark.parametrize(
    ("form", "call", "others"),
    [
        ("hermes", HERMES, ["", "Hello.", HERMES + " x", HERMES.replace('"city": "Paris", ', ""), HERMES[:-12], MORE]),
        ("llama3", LLAMA, ["{}", "[]", LLAMA.replace("get_weather", "other"), LLAMA.replace("2", '"two"')]),
        ("qwen_xml", XML, ["Hello.", XML.replace("\n3\n", "\nthree\n"), XML.replace("=city", "=town")]),
    ],
)
def test_a_demanded_call_allows_calls_only(tokenizer: Any, form: CallFormat, call: str, others: list[str]) -> None:
    """Nothing but calls of the tools, with arguments that fit; tags match as text and as tokens."""
    grammar_text = grammar(tokenizer, form, "required")
    separator = "; " if form == "llama3" else "\n"
    assert takes(tokenizer, grammar_text, call)
    assert takes(tokenizer, grammar_text, call + separator + call)
    assert [takes(tokenizer, grammar_text, other) for other in others] == [False] * len(others)
    single = grammar(tokenizer, form, "required", parallel=False)
    assert takes(tokenizer, single, call) and not takes(tokenizer, single, call + separator + call)


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "tokens"])
def test_reasoning_may_precede_a_demanded_call(tokenizer: Any) -> None:
    """A model that reasons may do so before the call; one whose prompt has opened the reasoning has to end it."""
    free = grammar(tokenizer, "hermes", "required", thinking=ThinkingMarks())
    assert takes(tokenizer, free, HERMES) and takes(tokenizer, free, f"<think>\nso\n</think>\n\n{HERMES}")
    begun = grammar(tokenizer, "hermes", "required", thinking=ThinkingMarks(begun=True))
    assert not takes(tokenizer, begun, HERMES) and takes(tokenizer, begun, f"so\n</think>\n\n{HERMES}")


def test_a_named_function_is_called_once() -> None:
    """Only that one may be called, once."""
    choice = msgspec.convert({"type": "function", "function": {"name": "get_time"}}, ToolChoice)
    grammar_text = grammar(MARKED, "hermes", choice)
    assert takes(MARKED, grammar_text, HERMES_TIME)
    assert not takes(MARKED, grammar_text, HERMES) and not takes(MARKED, grammar_text, f"{HERMES_TIME}\n{HERMES_TIME}")


def test_strict_functions_where_the_model_is_free() -> None:
    """It may answer with text, or call; but what it calls fits. Without strict functions nothing is enforced."""
    grammar_text = grammar(MARKED, "hermes", "auto", strict=True)
    for said in ("", "Hello.", HERMES, f"Well.\n{HERMES}\n{HERMES_TIME}"):
        assert takes(MARKED, grammar_text, said)
    assert not takes(MARKED, grammar_text, HERMES.replace('"city": "Paris", ', ""))
    assert grammar(MARKED, "hermes", "auto") is None
    assert grammar(PLAIN, "hermes", "auto", strict=True) is None


def test_an_answer_in_a_form_or_a_call() -> None:
    """Where the answer has a form the model may still call; reasoning may come before either."""
    offer = offered([msgspec.convert(WEATHER, Tool)], "auto", None)
    vocabulary = Vocabulary(byte_assets(tokenizer_json=MARKED.to_str()))
    answer = as_lark(Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'))
    grammar_text = answer_grammar(offer, "hermes", ThinkingMarks(), vocabulary, answer)
    for said in ('{"a": 1}', HERMES, '<think>\nso\n</think>\n\n{"a": 1}', f"<think>so</think>{HERMES}"):
        assert takes(MARKED, grammar_text, said)
    for said in ("Hello.", '{"a": "b"}', f'{{"a": 1}}\n{HERMES}'):
        assert not takes(MARKED, grammar_text, said)
    alone = answer_grammar(
        None, None, ThinkingMarks(begun=True), vocabulary, as_lark(Grammar("choice", '["yes", "no"]'))
    )
    assert takes(MARKED, alone, "so</think>yes") and not takes(MARKED, alone, "yes")
    digits = answer_grammar(None, None, ThinkingMarks(begun=True), vocabulary, as_lark(Grammar("regex", "a/[0-9]{2}")))
    assert takes(MARKED, digits, "so</think>a/12") and not takes(MARKED, digits, "so</think>a/1")
    assert as_lark(Grammar("lark", 'start: "a"')) is None


def custom(syntax: str, definition: str) -> Tool:
    """A custom tool of /v1/responses as the function that the model is offered."""
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    [tool] = read_tools([{"type": "custom", "name": "patch", "format": form}]).offered
    return msgspec.convert(tool.function, Tool)


LARK = 'start: line+\nline: ("+" | "-") /[^\\n]*/ LF\n%import common.LF'
REGEX = r"[+-]\d/\d"


@pytest.mark.parametrize("form", ["hermes", "llama3", "qwen_xml"])
@pytest.mark.parametrize(
    ("syntax", "definition", "good", "bad"), [("lark", LARK, "+a\n-}\n", "a\n"), ("regex", REGEX, "+1/2", "+1/x")]
)
def test_a_custom_tools_grammar_bounds_its_input(
    form: CallFormat, syntax: str, definition: str, good: str, bad: str
) -> None:
    """In every form, whether the value is written as it is or inside JSON."""
    offer = offered([custom(syntax, definition)], "required", None)
    assert offer is not None
    grammar_text = answer_grammar(offer, form, None, Vocabulary(byte_assets(tokenizer_json=MARKED.to_str())))

    def call(text: str) -> str:
        arguments = json.dumps({"input": text})
        if form == "hermes":
            return f'<tool_call>\n{{"name": "patch", "arguments": {arguments}}}\n</tool_call>'
        if form == "llama3":
            return f'{{"name": "patch", "parameters": {arguments}}}'
        inner = f"<function=patch>\n<parameter=input>\n{text}\n</parameter>\n</function>"
        return f"<tool_call>\n{inner}\n</tool_call>"

    assert takes(MARKED, grammar_text, call(good))
    assert not takes(MARKED, grammar_text, call(bad))
