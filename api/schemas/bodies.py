"""The request bodies in the OpenAPI document, with the bounds that requests are held to; handlers decode them by
themselves."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import msgspec
from litestar.openapi.spec import OpenAPI, OpenAPIMediaType, Operation, RequestBody

from api.schemas import generation
from control.bounds import RANGES, Range

JsonObject = dict[str, Any]

_bodies: dict[type[msgspec.Struct], bool] = {}
"""Types of bodies; True for one that may have unknown fields."""


def taking(kind: type[msgspec.Struct], *, open_ended: bool = False) -> type[Operation]:
    """The operation of a handler whose body is `kind`. All handlers are known when the first document is made.

    `open_ended`: the body may have unknown fields, which are ignored with a warning.
    """
    _bodies[kind] = open_ended

    @dataclass
    class Taking(Operation):
        def __post_init__(self) -> None:
            schema = cast(Any, _components()[0][kind])
            self.request_body = RequestBody(
                required=True, content={"application/json": OpenAPIMediaType(schema=schema)}
            )

    return Taking


def add_bodies(document: OpenAPI) -> None:
    """Put the schemas that the operations refer to beside those that the framework found by itself."""
    # Plain mappings are written as they are, though the types name the framework's own classes.
    cast(dict[str, Any], document.components.schemas).update(_components()[1])


@cache
def _components() -> tuple[dict[type[msgspec.Struct], dict[str, Any]], dict[str, Any]]:
    """References to the bodies' types, and their schemas by name."""
    references, schemas = msgspec.json.schema_components(_bodies, ref_template="#/components/schemas/{name}")
    for kind, open_ended in _bodies.items():
        if open_ended:
            schemas[kind.__name__].pop("additionalProperties", None)
    add_bounds(schemas)
    return dict(zip(_bodies, references, strict=True)), schemas


_LABEL: JsonObject = {"maxLength": generation.MAX_LABEL}
_NOT_SERVED: JsonObject = {"enum": [None, "", [], {}]}
"""A field that is known: only values that ask for nothing are taken."""
_IDS: JsonObject = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

_BY_NAME: dict[str, dict[str, JsonObject]] = {
    "model": {"string": {"maxLength": generation.MAX_MODEL_NAME}},
    "messages": {"array": {"minItems": 1, "maxItems": generation.MAX_MESSAGES}},
    "user": {"string": _LABEL},
    "user_id": {"string": _LABEL},
    "cache_salt": {"string": _LABEL},
    "stop": {"string": {"maxLength": generation.MAX_STOP_CHARACTERS}},
    "stop_token_ids": {"array": {"maxItems": generation.MAX_STOP_IDS}},
    "bad_words": {
        "array": {
            "maxItems": generation.MAX_BAD_WORDS,
            "items": {"type": "string", "minLength": 1, "maxLength": generation.MAX_BAD_WORD_CHARACTERS},
        }
    },
    "metadata": {
        "object": {
            "maxProperties": generation.MAX_PAIRS,
            "propertyNames": {"maxLength": generation.MAX_PAIR_NAME},
            "additionalProperties": {"type": "string", **_LABEL},
        }
    },
    "logit_bias": {
        "object": {"maxProperties": generation.MAX_BIASES, "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,8})$"}}
    },
    "on_disconnect": {"string": {"pattern": "^(cancel|continue|[0-9]{1,4})$"}},
}
"""Additions to a property of any body, by its name and the type of value."""

_CHOICE: JsonObject = {
    "anyOf": [{"type": "array", "items": {"type": "string", "minLength": 1}}, {"enum": [None, "", {}]}]
}

_OBJECT: JsonObject = {"anyOf": [{"type": "object"}, {"enum": [None, "", []]}]}
_GENERATING = ("ChatRequest", "CompletionRequest", "InfillRequest")

_BY_BODY: dict[tuple[str, str], JsonObject] = {
    ("CompletionRequest", "prompt"): {
        "anyOf": [
            {"type": "string", "minLength": 1},
            _IDS,
            {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 128},
            {"type": "array", "items": _IDS, "minItems": 1, "maxItems": 128},
        ]
    },
    ("Message", "audio"): {"enum": [None, [], {}]},
    ("MessageRequest", "thread"): {"type": "null"},
    **{(body, "guided_choice"): _CHOICE for body in _GENERATING},
    **{(body, name): _OBJECT for body in _GENERATING for name in ("response_format", "structured_outputs")},
    **{("ResponseRequest", name): _NOT_SERVED for name in ("conversation", "prompt", "moderation", "image")},
    ("ResponseRequest", "access_programs"): _NOT_SERVED,
    ("DetokenizeRequest", "tokens"): {"type": "array", "items": {"type": "integer", "minimum": 0}},
}
"""Replacements of a property of one body."""

_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_UNLIMITED_BODIES = ("ChatRequest", "CompletionRequest", "NativeRequest", "ResponseRequest")


def add_bounds(schemas: JsonObject) -> None:
    """Add to each body's properties what their values must be."""
    for body, schema in schemas.items():
        for name, property_ in schema.get("properties", {}).items():
            replacement = _BY_BODY.get((body, name))
            if replacement is not None:
                default = {"default": property_["default"]} if "default" in property_ else {}
                schema["properties"][name] = replacement | default
            elif name in _LIMITS:
                _limit(property_, Range(1, RANGES[name].most), unlimited=body in _UNLIMITED_BODIES)
            elif name in RANGES:
                bound_number(property_, RANGES[name])
            for kind, more in _BY_NAME.get(name, {}).items():
                for branch in _branches(property_, kind):
                    branch.update(more)
            if name == "logit_bias":
                for branch in _branches(property_, "object"):
                    bound_number(branch["additionalProperties"], RANGES[name])


def bound_number(schema: JsonObject, allowed: Range) -> None:
    """Add a range to the numbers that a schema takes."""
    for branch in [*_branches(schema, "integer"), *_branches(schema, "number")]:
        branch["exclusiveMinimum" if allowed.above else "minimum"] = allowed.least
        branch["maximum"] = allowed.most


def _limit(schema: JsonObject, allowed: Range, *, unlimited: bool) -> None:
    """A limit of tokens; -1: none."""
    bound_number(schema, allowed)
    if unlimited:
        schema["anyOf"] = [*schema["anyOf"], {"const": -1}]


def _branches(schema: JsonObject, kind: str) -> list[JsonObject]:
    """The parts of a schema that take values of this type."""
    parts = [schema, *schema.get("anyOf", []), *schema.get("oneOf", [])]
    return [each for each in parts if each.get("type") == kind]
