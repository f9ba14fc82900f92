"""Enforced calls are in the family's form: whatever the grammar allows is read as calls that fit the schema."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import jsonschema
import llguidance
import llguidance.numpy
import msgspec
import numpy
import pytest
from tokenizers import AddedToken, Tokenizer

from api.chat.enforcement import answer_grammar
from api.chat.reading.table import TABLE
from api.chat.reading.writing import written_calls
from api.chat.tokens import Vocabulary
from api.schemas.chat import Tool, offered
from api.schemas.view import Calling, Reading, ThinkingMarks
from control.messages import Grammar
from control.text.grammar import as_lark
from ops.bench.hostile.answers import read, tokens_of
from tests.byte_model import EOS, byte_assets, byte_tokenizer
from tests.unit.api.chat.spoken import SPOKEN

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "on": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "y": {"$ref": "#/$defs/y"}},
            "required": ["y"],
        },
    },
    "required": ["city", "days", "where"],
    "$defs": {"y": {"anyOf": [{"type": "null"}, {"type": "integer"}]}},
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "get_time"}}
ARGUMENTS: dict[str, Any] = {"city": "Zürich", "days": 2, "unit": "C", "where": {"x": 1.5, "y": None}}
CALLING = ["get_weather", "get_time"]
LITERAL = {"get_weather": ["days", "on", "tags", "where"]}
BARE = [name for name, form in TABLE.items() if form.calls is not None and form.calls.shape.bare]


@cache
def tokenizer(name: str, marked: bool) -> Tokenizer:
    """Bytes, and the marks of the form as tokens where they are `marked`."""
    made = byte_tokenizer()
    if marked:
        marks = sorted({mark for text in TABLE[name].marks for mark in tokens_of(name).findall(text)})
        made.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    return made


def vocabulary(name: str, marked: bool) -> Vocabulary:
    return Vocabulary(byte_assets(tokenizer_json=tokenizer(name, marked).to_str()))


def matcher(name: str, marked: bool, grammar: str | None) -> llguidance.LLMatcher:
    assert grammar is not None
    made = tokenizer(name, marked)
    known = llguidance.LLTokenizer(made.to_str(), eos_token=made.token_to_id(EOS))
    matching = llguidance.LLMatcher(known, llguidance.grammar_from("lark", grammar))
    assert not matching.is_error(), matching.get_error()
    return matching


def takes(name: str, marked: bool, grammar: str | None, said: str) -> bool:
    """True if an answer may be exactly this."""
    matching = matcher(name, marked, grammar)
    ids = tokenizer(name, marked).encode(said, add_special_tokens=False).ids
    return matching.try_consume_tokens(ids) == len(ids) and matching.is_accepting()


def grammar_of(name: str, marked: bool, choice: Any = "required", **options: Any) -> str | None:
    tools = [msgspec.convert(tool, Tool) for tool in (WEATHER, TIME)]
    offer = offered(tools, choice, options.get("parallel"))
    return answer_grammar(offer, name, options.get("thinking"), vocabulary(name, marked), options.get("answer"))


def thinking_of(name: str) -> ThinkingMarks | None:
    if SPOKEN[name].think is None:
        return None
    pair = TABLE[name].reasoning[0]
    return ThinkingMarks(pair.open if TABLE[name].channels else pair.open.strip(), pair.close.strip())


@pytest.mark.parametrize("marked", [False, True], ids=["text", "tokens"])
@pytest.mark.parametrize("name", SPOKEN)
def test_a_demanded_call_may_be_written_as_the_family_does(name: str, marked: bool) -> None:
    """By the grammar's own words, alone, in parallel, and after reasoning; text is no call."""
    form = TABLE[name]
    assert form.calls is not None
    one = written_calls(form.calls, [("get_weather", ARGUMENTS)])
    both = written_calls(form.calls, [("get_weather", ARGUMENTS), ("get_time", {})])
    grammar = grammar_of(name, marked)
    assert takes(name, marked, grammar, one)
    assert not takes(name, marked, grammar, "Hello.") and not takes(name, marked, grammar, "")
    assert not takes(name, marked, grammar, one.replace("get_weather", "other"))
    assert not takes(name, marked, grammar, written_calls(form.calls, [("get_weather", {"city": "x"})]))
    if form.channels is None:
        assert takes(name, marked, grammar, both)
    assert not takes(name, marked, grammar_of(name, marked, parallel=False), both)
    thinking = thinking_of(name)
    if thinking is not None:
        thought = grammar_of(name, marked, thinking=thinking)
        following = form.channels.following if form.channels is not None else ""
        assert takes(name, marked, thought, f"{thinking.open}I think.{thinking.close}{following}{one}")
        assert takes(name, marked, thought, one)


@pytest.mark.parametrize("name", SPOKEN)
def test_whatever_is_allowed_is_a_call_that_fits(name: str) -> None:
    """A model that chooses at random among what the grammar allows makes calls that its reader takes."""
    grammar, made = grammar_of(name, True), tokenizer(name, True)
    ends = made.token_to_id(EOS)
    assert ends is not None
    form = TABLE[name].calls
    assert form is not None
    closing = made.encode(form.shape.parameter.partition("{value}")[2], add_special_tokens=False).ids or [ends]
    marks = tuple(mark for text in TABLE[name].marks for mark in tokens_of(name).findall(text))
    for seed in range(5):
        random, matching = Random(f"{name}:{seed}"), matcher(name, True, grammar)
        ids: list[int] = []
        while not (matching.is_accepting() and random.random() < 0.5) and not matching.is_stopped():
            allowed = allowed_by(matching, made.get_vocab_size())
            # The end of a text that is no token would never be written by chance.
            if random.random() < 0.02 and matching.validate_tokens(closing) == len(closing):
                assert matching.consume_tokens(closing)
                ids += closing
                continue
            plain = [token for token in allowed if token != ends]
            wanted = LIKELY if len(ids) < 300 else CLOSING
            likely = [token for token in plain if token > 255 or made.decode([token]) in wanted] or plain
            ids.append(random.choice(likely))
            assert matching.consume_token(ids[-1]), matching.get_error()
            assert len(ids) < 3_000
        texts = [made.id_to_token(one) if one > 255 else None for one in ids]
        parts = parts_of(made, ids, texts)
        pieces = read(Reading(calling=Calling(name, CALLING, LITERAL), form=name), parts, marks)
        assert pieces.calls and not pieces.text.strip(), (made.decode(ids), pieces)
        for call in pieces.calls:
            assert call.name in CALLING
            if call.name == "get_weather":
                jsonschema.validate(json.loads(call.arguments), PARAMETERS)


PROMPTED = [name for name in SPOKEN if TABLE[name].prompted]


@pytest.mark.parametrize("name", PROMPTED)
def test_a_mark_that_the_prompt_has_begun_is_not_written_again(name: str) -> None:
    """The first call, or an answer in a format, goes on with it; it is read as if the model had written all of it."""
    form = TABLE[name]
    assert form.calls is not None
    tools = [msgspec.convert(tool, Tool) for tool in (WEATHER, TIME)]
    both = written_calls(form.calls, [("get_weather", ARGUMENTS), ("get_time", {})])
    grammar = answer_grammar(
        offered(tools, "required", None), name, None, vocabulary(name, True), prompted=form.prompted
    )
    assert not takes(name, True, grammar, both) and takes(name, True, grammar, both.removeprefix(form.prompted))
    how = Reading(calling=Calling(name, CALLING), form=name, prompted=form.prompted)
    for said in ([both.removeprefix(form.prompted)], both.removeprefix(form.prompted)):
        assert [call.name for call in read(how, said).calls] == ["get_weather", "get_time"]
    answer = as_lark(Grammar("json_schema", '{"type": "object"}'))
    grammar = answer_grammar(None, name, None, vocabulary(name, True), answer, form.prompted)
    said = f"{form.answer[0].removeprefix(form.prompted)}{{}}"
    assert takes(name, True, grammar, said) and read(how, said).text == "{}"


CLOSING = '"}])'
LIKELY = 'aé"}]>)<|\n{[,:0139.'


def allowed_by(matching: llguidance.LLMatcher, size: int) -> list[int]:
    mask = llguidance.numpy.allocate_token_bitmask(1, size)
    llguidance.numpy.fill_next_token_bitmask(matching, mask)
    bits = numpy.unpackbits(mask.view(numpy.uint8), bitorder="little")
    return [int(token) for token in numpy.flatnonzero(bits[:size])]


def parts_of(made: Tokenizer, ids: list[int], texts: list[str | None]) -> list[str]:
    """The answer's text, cut at its marks."""
    parts: list[str] = []
    run: list[int] = []
    for token, text in zip(ids, texts, strict=True):
        if text is None:
            run.append(token)
            continue
        parts += [made.decode(run)] if run else []
        parts.append(text)
        run = []
    return parts + ([made.decode(run)] if run else [])


@pytest.mark.parametrize("name", [name for name in SPOKEN if name not in BARE])
def test_an_answer_in_a_demanded_format(name: str) -> None:
    """It stands where the family's answers do: in the final channel, or between the marks of the text."""
    answer = as_lark(Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}'))
    form, thinking = TABLE[name], thinking_of(name)
    opened, closed = form.answer
    for choice in (None, "auto"):
        offer = offered([msgspec.convert(WEATHER, Tool)], choice, None) if choice else None
        grammar = answer_grammar(offer, name, thinking, vocabulary(name, True), answer)
        said = f'{opened}{{"a": 1}}{closed}'
        assert takes(name, True, grammar, said)
        assert not takes(name, True, grammar, said.replace("1", '"b"'))
        how = Reading(thinking, Calling(name, CALLING) if choice else None, form=name)
        assert read(how, [said]).text == '{"a": 1}'
        if thinking is not None:
            following = form.channels.following if form.channels is not None else ""
            whole = f"{thinking.open}so{thinking.close}{following}{said}"
            assert takes(name, True, grammar, whole)
            piece = read(how, [whole])
            assert (piece.reasoning, piece.text) == ("so", '{"a": 1}')
