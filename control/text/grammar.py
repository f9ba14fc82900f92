"""Grammars compiled by llguidance: the API compiles to check, the leader to constrain, both with the same limits.

The library bounds what a grammar may cost by itself (`_LIMITS`, and the size of an expanded schema), never fetches a
reference, and lets other threads run meanwhile. JSON schemas are first written in the keywords that it enforces
(`for_library`). The meaning stays: a keyword is only replaced by others that allow the same values. Where there are
none the keyword stays, and the library refuses it by name.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from control.errors import GrammarRefused
from control.messages import Grammar
from control.text.vocabulary import TokenBytes

FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""The formats that the library enforces. Any other is an annotation, as in the standard."""
MOST_ARRAYS = 400
"""Arrays that stand for one with `uniqueItems`."""

_MAPS = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")
_LISTS = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_SINGLE = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedProperties",
)
_IN_PLACE = ("$ref", "allOf", "anyOf", "else", "if", "oneOf", "then")
"""Keywords whose schemas describe the same object."""
_LOOK_AROUND = re.compile(r"\(\?[=!][^()]*\)")
_UUID = re.compile(r"uuid[1-8]")

Schema = dict[str, Any]


def for_library(schema: Any) -> Any:
    """The same schema, changed in place: `schema` is fresh from a JSON decoder."""
    for part in _schemas(schema):
        _format(part)
        _unique_items(part, schema)
        _property_names(part, schema)
        if part.get("unevaluatedProperties") is False and not any(word in part for word in _IN_PLACE):
            del part["unevaluatedProperties"]
            part["additionalProperties"] = False
    return schema


def _schemas(root: Any) -> Iterator[Schema]:
    """Every schema inside the schema, itself first; without recursion, because a hostile one is deep."""
    waiting = [root]
    while waiting:
        subschema = waiting.pop()
        if not isinstance(subschema, dict):
            continue
        yield subschema
        waiting += [subschema[word] for word in _SINGLE if word in subschema]
        waiting += [part for word in _LISTS if isinstance(subschema.get(word), list) for part in subschema[word]]
        waiting += [
            part for word in _MAPS if isinstance(subschema.get(word), dict) for part in subschema[word].values()
        ]


def _format(part: Schema) -> None:
    """Drop an unknown format. A known one says what the look-around of its pattern says, as zod writes both."""
    name = part.get("format")
    if not isinstance(name, str):
        return
    if _UUID.fullmatch(name):
        part["format"] = "uuid"
    elif name not in FORMATS:
        del part["format"]
    elif isinstance(part.get("pattern"), str):
        part["pattern"] = _LOOK_AROUND.sub("", part["pattern"])


def _unique_items(part: Schema, root: Any) -> None:
    """An array of different values out of a few is one of a few arrays."""
    unique = part.get("uniqueItems")
    if unique is False or (unique is True and part.get("maxItems") in (0, 1)):
        del part["uniqueItems"]
    elif unique is True:
        values = _values(part.get("items"), root)
        least = part.get("minItems", 0)
        most = part.get("maxItems", len(values or ()))
        if values is None or not isinstance(least, int) or not isinstance(most, int):
            return
        sizes = range(least, min(most, len(values)) + 1)
        if 0 < sum(math.perm(len(values), size) for size in sizes) <= MOST_ARRAYS:
            arrays = [list(array) for size in sizes for array in itertools.permutations(values, size)]
            for word in ("uniqueItems", "items", "minItems", "maxItems", "type"):
                part.pop(word, None)
            part["enum"] = arrays


def _property_names(part: Schema, root: Any) -> None:
    """Names that are any text need no keyword; a few names are properties; names by a pattern are patternProperties."""
    names = part.get("propertyNames")
    if names is True or names in ({}, {"type": "string"}):
        del part["propertyNames"]
        return
    value = part.get("additionalProperties", True)
    allowed = _values(names, root)
    if allowed is not None and "patternProperties" not in part and isinstance(part.get("properties", {}), dict):
        properties = part.get("properties", {})
        part["properties"] = {name: properties.get(name, value) for name in allowed if isinstance(name, str)}
    elif isinstance(names, dict) and names.keys() - {"type"} == {"pattern"} and not part.keys() & {*_MAPS}:
        part["patternProperties"] = {names["pattern"]: value}
    else:
        return
    del part["propertyNames"]
    part["additionalProperties"] = False


def _values(schema: Any, root: Any) -> list[Any] | None:
    """The values of a schema that lists them, behind references inside `root` too; None for any other."""
    for _ in range(8):
        if not isinstance(schema, dict):
            return None
        if isinstance(values := schema.get("enum"), list):
            return list({json.dumps(value, sort_keys=True): value for value in values}.values())
        if "const" in schema:
            return [schema["const"]]
        if schema.get("type") == "boolean":
            return [True, False]
        schema = _resolved(schema.get("$ref"), root)
    return None


def _resolved(reference: Any, root: Any) -> Any:
    """The schema at a reference such as `#/$defs/name`; None where there is none."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    schema = root
    for part in reference[2:].split("/"):
        word = part.replace("~1", "/").replace("~0", "~")
        schema = schema.get(word) if isinstance(schema, dict) else None
    return schema


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
    tokenizer = LLTokenizer(wrapped, eos_token=eos)
    words.tokens = wrapped.tokens = []  # it has its own copy, and keeps both objects
    return tokenizer


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
