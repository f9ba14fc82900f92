"""Grammars compiled by llguidance: the API compiles to check, the leader to constrain, both with the same limits.

The library bounds what a grammar may cost by itself (`_LIMITS`, and the size of an expanded schema), never fetches a
reference, and lets other threads run meanwhile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from control.errors import GrammarRefused
from control.messages import Grammar
from control.text.json_schema import for_library
from control.text.vocabulary import TokenBytes

MAX_CHARACTERS = 131_072
"""Limit of a grammar's text."""

_WHITE_SPACE = r"( |\n[ ]{0,24})"
"""White space that JSON may have between two tokens: a space, or a new line with its indentation. A model that was not
trained on JSON would repeat longer white space up to its limit of tokens."""
_LIMITS = LLParserLimits(verbose_errors=False)
_MESSAGE_CHARACTERS = 400
_NO_TOKENS = "<non-verbose/>"


_GBNF_RULE = re.compile(r"^\s*[A-Za-z][\w-]*\s*::=", re.MULTILINE)
_LARK_START = re.compile(r"^\s*start\s*:(?!:=)", re.MULTILINE)
_END = b"<|end of grammar|>"


class _Words:
    """A vocabulary as the library wants it. Its own tokenisation, byte by byte, is not used."""

    bos_token_id = None

    def __init__(self, texts: list[bytes], markers: list[int], eos: int) -> None:
        self.tokens = texts
        self.special_token_ids = markers
        self.eos_token_id = eos
        self._bytes = {text[0]: token for token, text in enumerate(texts) if len(text) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return [self._bytes[byte] for byte in text if byte in self._bytes]


def tokenizer_of(tokens: TokenBytes, eos_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary in the library's form. A grammar's end allows `eos_ids`; without any, an id beyond all others.

    Takes about 0.4 s for 150,000 tokens, during which no other Python thread runs.
    """
    texts = tokens.texts
    eos = list(eos_ids)
    if not eos:
        texts, eos = [*texts, _END], [len(texts)]
    words = _Words(texts, sorted({*tokens.added, *eos}), eos[0])
    wrapped = TokenizerWrapper(words)
    made = LLTokenizer(wrapped, eos_token=eos)
    words.tokens = wrapped.tokens = []  # it has its own copy, and keeps both objects
    return made


def converted(grammar: Grammar) -> Grammar:
    """A GBNF grammar, as llama.cpp has them, as the same in Lark; any other as it is. Raises GrammarRefused."""
    text = grammar.text
    if grammar.kind != "lark" or _LARK_START.search(text) or not _GBNF_RULE.search(text):
        return grammar
    _bound(text)
    try:
        return Grammar("lark", gbnf_to_lark(text))
    except Exception as error:  # a parser without an error tree of its own; too deep a nesting is among them
        raise GrammarRefused(f"it can't be read as GBNF: {error}") from None


def as_lark(grammar: Grammar) -> str | None:
    """The grammar as what stands behind the colon of a rule in a larger one, meaning the same; None for Lark itself."""
    match grammar.kind:
        case "json_object":
            return _json_in_lark({"type": "object"})
        case "json_schema":
            return _json_in_lark(for_library(json.loads(grammar.text)))
        case "choice":
            return _quoted(json.loads(grammar.text))
        case "regex":
            return f"/{regex_to_lark(grammar.text, '')}/"
        case "lark":
            return None


def compile_grammar(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the grammar's beginning; copies of it are cheap. Raises GrammarRefused with the library's words."""
    _bound(grammar.text)
    try:
        text = _for_library(grammar)
    except (ValueError, RecursionError) as error:
        raise GrammarRefused(str(error)) from None
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarRefused(error_of(matcher))
    return matcher


def _bound(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise GrammarRefused(f"it has {len(text)} characters; at most {MAX_CHARACTERS} are taken")


def error_of(matcher: LLMatcher) -> str:
    """The library's error message, shortened."""
    text = matcher.get_error().replace(_NO_TOKENS, "").strip()
    if text.startswith("NoExtension"):
        return "no token of this model's vocabulary goes on with it"
    return text if len(text) <= _MESSAGE_CHARACTERS else text[:_MESSAGE_CHARACTERS] + "…"


def _for_library(grammar: Grammar) -> str:
    match grammar.kind:
        case "json_object":
            return _schema('{"type": "object"}')
        case "json_schema":
            return _schema(json.dumps(for_library(json.loads(grammar.text)), ensure_ascii=False))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            # A terminal, not a rule: the parser has a bound on alternatives, the lexer takes thousands.
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {_quoted(json.loads(grammar.text))}")
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def _schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITE_SPACE})


def _json_in_lark(schema: dict[str, Any]) -> str:
    own = schema.get("x-guidance", {})
    if isinstance(own, dict):
        schema = schema | {"x-guidance": {"whitespace_pattern": _WHITE_SPACE} | own}
    return "%json " + json.dumps(schema, ensure_ascii=False)


def _quoted(texts: list[str]) -> str:
    return " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
