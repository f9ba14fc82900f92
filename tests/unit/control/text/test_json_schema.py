"""JSON schemas are enforced or refused by keyword: those of pydantic and zod."""

from __future__ import annotations

import json
from typing import Any

import pytest

from control.errors import GrammarRefused
from control.messages import Grammar
from control.text.grammar import FORMATS, as_lark, compile_grammar, tokenizer_of
from control.text.vocabulary import TokenBytes

BYTES = tokenizer_of(TokenBytes([bytes([byte]) for byte in range(256)], []), [])
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
COLOURS = {"$defs": {"colour": {"enum": ["red", "blue"]}}}


def allows(schema: Any, value: Any) -> bool:
    matcher = compile_grammar(Grammar("json_schema", json.dumps(schema)), BYTES)
    text = list(json.dumps(value).encode())
    return matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "string", "format": "password"}, ["x"], [1]),
        ({"type": "integer", "format": "int32"}, [7], ["x"]),
        ({"type": "string", "format": "uuid4"}, ["c91ef173-fff4-464b-ac0a-ce22f9e34121"], ["c91e"]),
        ({"type": "string", "format": "date"}, ["2026-11-22"], ["today"]),
        ({"type": "string", "format": "email", "pattern": EMAIL}, ["a.b@x.org"], [".a@x.org", "a..b@x.org", "a"]),
        (
            {"type": "string", "format": "duration", "pattern": DURATION},
            ["P1D", "PT2H3M", "P2W"],
            ["P", "PT", "P1WT1H"],
        ),
        ({"type": "string", "format": "cuid", "pattern": "^[cC][^\\s-]{8,}$"}, ["c12345678"], ["d12345678"]),
        ({"type": "object", "properties": {"format": {"type": "integer"}}}, [{"format": 1}], [{"format": "x"}]),
    ],
)
def test_a_format_is_enforced_or_an_annotation(schema: Any, allowed: list[Any], forbidden: list[Any]) -> None:
    """A known format holds, with the pattern that zod repeats it in; an unknown one forbids nothing."""
    assert all(allows(schema, value) for value in allowed)
    assert not any(allows(schema, value) for value in forbidden)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_library_knows_each_format(name: str) -> None:
    compile_grammar(Grammar("json_schema", json.dumps({"type": "string", "format": name})), BYTES)


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"items": {"enum": ["a", "b", "b"]}, "uniqueItems": True}, [[], ["a"], ["b", "a"]], [["a", "a"], ["c"], "a"]),
        (
            COLOURS | {"type": "array", "items": {"$ref": "#/$defs/colour"}, "uniqueItems": True, "minItems": 1},
            [["blue"], ["red", "blue"]],
            [[], ["red", "red"]],
        ),
        ({"items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 9}, [[True, False]], [[True, True]]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1}, [["a"]], [["a", "a"]]),
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": False}, [["a", "a"]], ["a"]),
    ],
)
def test_unique_items_of_a_small_array_hold(schema: Any, allowed: list[Any], forbidden: list[Any]) -> None:
    assert all(allows(schema, value) for value in allowed)
    assert not any(allows(schema, value) for value in forbidden)


@pytest.mark.parametrize(
    ("schema", "allowed", "forbidden"),
    [
        ({"type": "object", "propertyNames": {"type": "string"}}, [{"any": 1}], [1]),
        (
            COLOURS | {"propertyNames": {"$ref": "#/$defs/colour"}, "additionalProperties": {"type": "integer"}},
            [{"red": 1}, {"red": 1, "blue": 2}],
            [{"green": 1}, {"red": "x"}],
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^x-"}, "additionalProperties": {"type": "integer"}},
            [{"x-a": 1}],
            [{"a": 1}, {"x-a": "x"}],
        ),
        ({"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False}, [{"a": 1}], [{"a": 1, "b": 1}]),
    ],
)
def test_names_of_properties_hold(schema: Any, allowed: list[Any], forbidden: list[Any]) -> None:
    assert all(allows(schema, value) for value in allowed)
    assert not any(allows(schema, value) for value in forbidden)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"enum": list(range(9))}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": {"$ref": "#"}, "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "propertyNames": {"minLength": 3}}, "propertyNames"),
        ({"allOf": [{"type": "object"}], "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"type": "string", "pattern": "^(?!a)b"}, "look-around"),
    ],
)
def test_a_keyword_that_cannot_hold_is_named(schema: Any, keyword: str) -> None:
    """Also below a property, and in a schema inside a larger grammar."""
    for whole in (schema, {"type": "object", "properties": {"p": schema}}):
        with pytest.raises(GrammarRefused, match=keyword):
            compile_grammar(Grammar("json_schema", json.dumps(whole)), BYTES)


def test_a_schema_inside_a_larger_grammar_is_the_same() -> None:
    rule = as_lark(Grammar("json_schema", '{"type": "string", "format": "path"}'))
    assert rule is not None and "format" not in rule


def test_a_schema_that_is_nested_very_deeply_is_refused() -> None:
    text = '{"items":' * 5_000 + "{}" + "}" * 5_000
    with pytest.raises(GrammarRefused):
        compile_grammar(Grammar("json_schema", text), BYTES)
