"""Grammars are checked in bounded time: verdicts in the library's words, for hostile ones too."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import psutil
import pytest

from api.chat.tokens import Vocabulary
from api.models.grammar import GrammarChecks, grammar_tokens
from api.schemas.generation import RequestedGrammar
from control.errors import RequestError
from control.messages import Grammar
from control.text.grammar_check import GrammarTokens
from control.text.vocabulary import read_token_bytes
from tests.byte_model import byte_assets

ASSETS = byte_assets()
LETTERS = grammar_tokens(Vocabulary(ASSETS), ASSETS)


def run(work: Callable[[GrammarChecks], Coroutine[Any, Any, Any]], longest_s: float = 20.0, processes: int = 1) -> Any:
    async def scene() -> Any:
        checks = GrammarChecks(longest_s, processes)
        try:
            return await work(checks)
        finally:
            await checks.stop()

    return asyncio.run(scene())


def schema(value: Any) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


async def verdict(checks: GrammarChecks, grammar: Grammar) -> str:
    """Empty where it is fine."""
    try:
        await checks.check(RequestedGrammar(grammar, "p"), LETTERS)
    except RequestError as error:
        assert error.param == "p" and error.code == "invalid_grammar"
        return str(error)
    return ""


def test_letters_are_those_of_the_file() -> None:
    """Where every token is a byte or a marker, what the API reads from its tokenizer is all that the file says."""
    data = msgspec.json.decode(LETTERS, type=GrammarTokens)
    assert data.tokens == read_token_bytes(ASSETS.tokenizer_json, ASSETS.vocab_size)
    assert data.eos == ASSETS.eos_ids and set(data.added.values()) == {"<s>", "</s>"}


FINE = [
    Grammar("json_object"),
    schema({"type": "array", "items": {"type": "integer"}, "maxItems": 10**9}),
    schema({"type": "string", "minLength": 10**9}),
    schema(
        {
            "$defs": {"n": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/$defs/n"}}]}},
            "$ref": "#/$defs/n",
        }
    ),
    schema({"enum": [f"value {i}" for i in range(5000)]}),
    schema({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"}),
    Grammar("regex", r"^[A-Z]{2}-\d+$"),
    Grammar("choice", json.dumps([f"wörd {i}" for i in range(5000)], ensure_ascii=False)),
    Grammar("lark", 'start: "a" | b\nb: %json {"type": "object"}'),
    Grammar("lark", "start: <s> </s>"),
    Grammar("lark", 'root ::= "a" | [0-9]+ ws\nws ::= " "*'),
]


def test_what_can_be_served() -> None:
    """Schemas large and recursive, regexes, choices, Lark with JSON and markers inside, and GBNF."""

    async def work(checks: GrammarChecks) -> list[str]:
        return [await verdict(checks, grammar) for grammar in FINE]

    assert run(work) == [""] * len(FINE)


def deep(levels: int) -> Any:
    return {"items": deep(levels - 1)} if levels else {}


REFUSED = [
    (schema({"type": "strin"}), "strin"),
    (schema({"type": "object", "uniqueItems": True, "not": {}}), "uniqueItems"),
    (schema({"$ref": "http://127.0.0.1:1/schema.json"}), "does not fetch"),
    (schema({"$ref": "file:///etc/hostname"}), "does not fetch"),
    (schema({"$ref": "#"}), "no token"),
    (schema({"$ref": "#/definitions/none"}), "does not exist"),
    (schema({"type": "integer", "minimum": 5, "maximum": 1}), "greater than"),
    (schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    (schema({"enum": ["x" * 200_000]}), "at most 131072"),
    (schema(deep(200)), "recursion limit"),
    (Grammar("regex", "(a"), "unclosed group"),
    (Grammar("regex", "(" * 20_000 + "a" + ")" * 20_000), "invalid regex"),
    (Grammar("lark", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000), "nested"),
    (Grammar("lark", "start: start"), "no token"),
    (Grammar("lark", "start: <nope>"), "nope"),
    (Grammar("lark", "root ::= ("), "GBNF"),
    (Grammar("lark", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), "GBNF"),
]


def test_a_bad_grammar_is_refused_and_the_next_is_checked() -> None:
    """Bad, unsupported or hostile: the words say what it is, nothing is fetched, and the next check is as ever."""

    async def work(checks: GrammarChecks) -> None:
        for grammar, words in REFUSED:
            said = await verdict(checks, grammar)
            assert words in said and len(said) < 700, (grammar.text[:80], said)
        assert await verdict(checks, FINE[1]) == ""

    run(work)


SLOW = schema({"type": "integer", "multipleOf": 1_000_003})
"""Takes seconds."""


def test_what_takes_too_long_is_cut_off_and_remembered() -> None:
    """It is refused after its time, at once when it is sent again, and another process goes on meanwhile."""

    async def work(checks: GrammarChecks) -> None:
        await verdict(checks, FINE[0])
        slow = asyncio.create_task(verdict(checks, SLOW))
        await asyncio.sleep(0)
        assert await verdict(checks, FINE[1]) == "" and not slow.done()
        assert "takes longer than 3 s" in await slow
        assert "takes longer" in await asyncio.wait_for(verdict(checks, SLOW), 2.0)

    run(work, longest_s=3.0, processes=2)


def test_a_grammar_that_ends_its_process_is_refused() -> None:
    """As one does that wants more memory or stack than there is; the next is checked by a new process."""

    async def work(checks: GrammarChecks) -> None:
        known = {child.pid for child in psutil.Process().children()}
        slow = asyncio.create_task(verdict(checks, SLOW))
        while not (mine := [child for child in psutil.Process().children() if child.pid not in known]):
            assert not slow.done()
            await asyncio.sleep(0.01)
        mine[0].kill()
        assert "too deeply nested" in await slow
        assert await verdict(checks, FINE[0]) == ""

    run(work)


def test_who_gives_up_leaves_no_answer_behind() -> None:
    """The process of a check that was cancelled is ended: its answer would be taken for the next one's."""

    async def work(checks: GrammarChecks) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(verdict(checks, SLOW), 2.0)
        assert "strin" in await verdict(checks, REFUSED[0][0]) and await verdict(checks, FINE[0]) == ""

    run(work)
