"""Parameters that ask for a grammar; and which bodies are refused before anything is compiled."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from api.schemas.chat import parse_chat
from api.schemas.generation import RequestedGrammar, grammar_of
from control.errors import RequestError
from control.messages import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def asked(**fields: Any) -> RequestedGrammar | None:
    return grammar_of(parse_chat(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}], **fields})))


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def test_a_body_is_never_too_deep_to_be_refused() -> None:
    """A hundred levels are taken, whatever they hold; thousands are a 400 before anything else."""
    assert asked(guided_json=deep(99)) is not None
    body = b'{"messages": [], "guided_json": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    with pytest.raises(RequestError, match="nested too deeply"):
        parse_chat(body)


def test_free_text_has_no_grammar() -> None:
    """Nothing, OpenAI's `text`, and values that ask for nothing."""
    nothing = [
        {},
        {"response_format": {"type": "text"}},
        {"guided_json": None, "guided_regex": "", "guided_choice": []},
    ]
    assert [asked(**fields) for fields in [*nothing, {"structured_outputs": {"json_object": False}}]] == [None] * 4


@pytest.mark.parametrize(
    ("fields", "grammar", "param"),
    [
        ({"response_format": {"type": "json_object"}}, Grammar("json_object"), "response_format"),
        ({"guided_regex": "a+"}, Grammar("regex", "a+"), "guided_regex"),
        ({"response_format": {"type": "regex", "value": "a+"}}, Grammar("regex", "a+"), "response_format.value"),
        ({"guided_choice": ["yes", "é"]}, Grammar("choice", '["yes","é"]'), "guided_choice"),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"'), "guided_grammar"),
        ({"grammar": 'root ::= "a"'}, Grammar("lark", 'root ::= "a"'), "grammar"),
        ({"structured_outputs": {"regex": "a"}}, Grammar("regex", "a"), "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar("choice", '["a"]'), "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "x"}}, Grammar("lark", "x"), "structured_outputs.grammar"),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object"), "structured_outputs.json_object"),
    ],
)
def test_every_form_becomes_the_same_grammar(fields: dict[str, Any], grammar: Grammar, param: str) -> None:
    """Each neighbour's parameter becomes the same grammar, and errors will name the parameter that was sent."""
    assert asked(**fields) == RequestedGrammar(grammar, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, "json_schema"),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, "response_format.schema"),
        ({"response_format": {"type": "json_object", "value": SCHEMA}}, "response_format.value"),
        ({"response_format": {"type": "json", "value": SCHEMA}}, "response_format.value"),
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_json": msgspec.json.encode(SCHEMA).decode()}, "guided_json"),
        ({"json_schema": SCHEMA}, "json_schema"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
    ],
)
def test_every_form_of_a_schema(fields: dict[str, Any], param: str) -> None:
    """A schema comes as an object or as its text; one that is not strict may have overlapping parts of a oneOf."""
    answer = asked(**fields)
    assert answer is not None and param in answer.param
    assert msgspec.json.decode(answer.grammar.text) == SCHEMA | {"x-guidance": {"coerce_one_of": True}}


def test_a_strict_schema_is_taken_to_the_letter() -> None:
    """Nothing is added to it; what the caller says to the library himself goes before what is added otherwise."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    answer = asked(response_format=form)
    assert answer == RequestedGrammar(
        Grammar("json_schema", msgspec.json.encode(SCHEMA).decode()), "response_format.json_schema.schema"
    )
    own = asked(guided_json={"x-guidance": {"coerce_one_of": False, "lenient": True}})
    assert own is not None
    assert msgspec.json.decode(own.grammar.text) == {"x-guidance": {"coerce_one_of": False, "lenient": True}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json"}}, "response_format.value", "Missing"),
        ({"response_format": {"type": "regex"}}, "response_format.value", "Missing"),
        ({"response_format": {"type": "regex", "value": {}}}, "response_format.value", "text"),
        ({"response_format": {"type": "json_object", "value": 1}}, "response_format.value", "JSON schema"),
        (
            {"response_format": {"type": "json_object", "value": SCHEMA, "schema": SCHEMA}},
            "response_format.value",
            "both",
        ),
        ({"response_format": {"schema": {}}}, "response_format", "type"),
        ({"response_format": "json"}, "response_format", "object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "Missing"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
            "Missing",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
            "object",
        ),
        ({"response_format": {"type": "json_object", "colour": 1}}, "response_format", "colour"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_json": [1]}, "guided_json", "must be a JSON schema"),
        ({"guided_json": deep(101)}, "guided_json", "more than 100 levels"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "empty"),
        ({"guided_choice": "yes"}, "guided_choice", "array"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]", "str"),
        ({"guided_regex": 1}, "guided_regex", "str"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs.choice",
            "structured_outputs.regex",
        ),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex", "response_format"),
    ],
)
def test_a_wrong_form_is_refused_by_its_parameter(fields: dict[str, Any], param: str, words: str) -> None:
    """The error names the parameter and says what is wrong; two that constrain the answer are both named."""
    with pytest.raises(RequestError) as caught:
        asked(**fields)
    assert caught.value.param == param and words in str(caught.value)


def test_one_grammar_under_two_names_is_one() -> None:
    """Clients send it for servers of two ages; two grammars are refused as before, with the second one's name."""
    assert asked(structured_outputs={"grammar": "x"}, guided_grammar="x") == RequestedGrammar(
        Grammar("lark", "x"), "structured_outputs.grammar"
    )
    assert asked(guided_json=SCHEMA, structured_outputs={"json": SCHEMA}, json_schema=SCHEMA) is not None
    with pytest.raises(RequestError, match=r"'structured_outputs\.grammar' and 'guided_grammar' both") as refused:
        asked(structured_outputs={"grammar": "x"}, guided_grammar="y")
    assert refused.value.param == "guided_grammar"
