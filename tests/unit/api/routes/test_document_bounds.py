"""The OpenAPI document has the bounds in force: from the same tables."""

from __future__ import annotations

from typing import Any

import jsonschema
import msgspec
import pytest

from api.app import ROUTES
from api.routes.document import OpenApiDocument
from api.schemas.chat import parse_chat
from api.schemas.completions import parse_completion
from api.schemas.messages import parse_message
from control.bounds import RANGES
from control.errors import RequestError

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
PARSERS: dict[str, Any] = {
    "ChatRequest": (parse_chat, CHAT),
    "CompletionRequest": (parse_completion, {"prompt": "x"}),
    "MessageRequest": (parse_message, CHAT | {"max_tokens": 9}),
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return OpenApiDocument(ROUTES).whole


@pytest.mark.parametrize(
    ("body", "fields", "fits"),
    [
        ("ChatRequest", {}, True),
        ("ChatRequest", {"temperature": 5}, True),
        ("ChatRequest", {"temperature": 5.01}, False),
        ("ChatRequest", {"timeout": 0}, False),
        ("ChatRequest", {"seed": 2**64 - 1}, True),
        ("ChatRequest", {"seed": 2**64}, False),
        ("ChatRequest", {"n": 129}, False),
        ("ChatRequest", {"n": 2.0, "max_tokens": 9.0}, True),
        ("ChatRequest", {"n": 2.5}, False),
        ("ChatRequest", {"max_tokens": -1}, True),
        ("ChatRequest", {"max_tokens": 0}, False),
        ("ChatRequest", {"messages": []}, False),
        ("ChatRequest", {"messages": [{"role": "user", "content": "x"}] * 4097}, False),
        ("ChatRequest", {"user": "x" * 513}, False),
        ("ChatRequest", {"metadata": {"k" * 65: ""}}, False),
        ("ChatRequest", {"metadata": {str(index): "" for index in range(17)}}, False),
        ("ChatRequest", {"stop": "x" * 1025}, False),
        ("ChatRequest", {"bad_words": [""]}, False),
        ("ChatRequest", {"logit_bias": {"5": 100}}, True),
        ("ChatRequest", {"logit_bias": {"5": 101}}, False),
        ("ChatRequest", {"logit_bias": {"x": 1}}, False),
        ("CompletionRequest", {"prompt": []}, False),
        ("CompletionRequest", {"prompt": ["x", 5]}, False),
        ("CompletionRequest", {"prompt": [[1, 2], [3]]}, True),
        ("CompletionRequest", {"best_of": 129}, False),
        ("MessageRequest", {"max_tokens": 0}, False),
        ("MessageRequest", {"priority": "highest"}, False),
        ("MessageRequest", {"thread": {"type": "create"}}, False),
        ("MessageRequest", {"context_management": []}, False),
    ],
)
def test_what_the_document_allows_is_what_is_taken(
    document: dict[str, Any], body: str, fields: dict[str, Any], fits: bool
) -> None:
    """At its bounds a value is taken by both, and beyond them by none."""
    parse, least = PARSERS[body]
    given = least | fields
    schema = {"$ref": f"#/components/schemas/{body}", "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(given) == fits
    if fits:
        parse(msgspec.json.encode(given))
    else:
        with pytest.raises(RequestError):
            parse(msgspec.json.encode(given))


def test_a_number_without_a_fraction_is_an_integer_up_to_where_floats_are_exact() -> None:
    """Larger ones are refused, whatever they are, as is a body that breaks off behind one."""
    assert parse_chat(msgspec.json.encode(CHAT | {"seed": -4.0})).seed == -4
    for text in (b'{"messages": [], "seed": 1e300}', b'{"messages": [], "seed": 1e16}', b'{"seed": 1.0, "messages": ['):
        with pytest.raises(RequestError):
            parse_chat(text)


def test_an_unknown_field_with_any_name_is_unknown() -> None:
    """A backtick in it, which the library's message has too, is no wrong type."""
    with pytest.raises(RequestError) as caught:
        parse_chat(msgspec.json.encode(CHAT | {"a`b\n`": 1}))
    assert caught.value.code == "unknown_parameter"


def _bounds(schema: Any) -> list[tuple[float | None, float | None]]:
    """Least and most of every number in a schema."""
    if isinstance(schema, list):
        return [bounds for part in schema for bounds in _bounds(part)]
    if not isinstance(schema, dict):
        return []
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    return [(least, schema.get("maximum")), *(bounds for part in schema.values() for bounds in _bounds(part))]


def _named(node: Any, name: str) -> list[Any]:
    """The schemas of the fields and parameters of a name."""
    if isinstance(node, list):
        return [schema for part in node for schema in _named(part, name)]
    if not isinstance(node, dict):
        return []
    properties = node.get("properties")
    schemas = [properties[name]] if isinstance(properties, dict) and name in properties else []
    if node.get("name") == name and "in" in node:
        schemas.append(node["schema"])
    return schemas + [schema for part in node.values() for schema in _named(part, name)]


@pytest.mark.parametrize("name", RANGES)
def test_every_number_shows_its_range(document: dict[str, Any], name: str) -> None:
    """docs/api.md sends readers there. An answer of 0 tokens is for scored prompts alone."""
    allowed = RANGES[name]
    least = 1 if name in ("max_tokens", "max_completion_tokens", "max_output_tokens") else allowed.least
    assert (least, allowed.most) in _bounds(_named(document, name))
