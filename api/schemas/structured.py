"""Structured output as one grammar, from OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, or
llama.cpp's `grammar` and `json_schema`. A request may use one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from api.schemas.bounds import deeper
from api.schemas.generation import GenerationFields
from api.schemas.refusals import missing
from control.errors import RequestError
from control.messages import Grammar

MAX_DEPTH = 100
"""Levels of a schema; the library's own limit is a little above."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A grammar, and the parameter that asked for it."""

    grammar: Grammar
    param: str


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's; `schema` beside `json_object` is llama.cpp's. Other fields of neighbours would change the answer."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's; exactly one field is given."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def grammar_of(request: GenerationFields) -> Asked | None:
    """The grammar of the answers; None for free text. Raises RequestError, also for two parameters at once."""
    asked = [
        one
        for name, read in _READERS.items()
        if getattr(request, name) not in (None, "", {}, []) and (one := read(getattr(request, name), name)) is not None
    ]
    only_one([one.param for one in asked])
    return asked[0] if asked else None


def only_one(params: list[str]) -> None:
    """Raise RequestError where several parameters constrain the answer, naming them."""
    if len(params) > 1:
        names = " and ".join(f"'{name}'" for name in params)
        raise RequestError(f"{names} both constrain the answer; send one of them.", param=params[1])


# --- one reader per parameter ---------------------------------------------------------------------------------------


def _response_format(value: Any, param: str) -> Asked | None:
    given = _decoded(value, ResponseFormat, param)
    match given.type:
        case "text":
            return None
        case "json_object" if given.schema is None:
            return Asked(Grammar("json_object"), param)
        case "json_object":
            return Asked(_schema(given.schema, False, f"{param}.schema"), f"{param}.schema")
        case "json_schema":
            here = f"{param}.json_schema"
            if given.json_schema is None:
                raise missing(here)
            if given.json_schema.schema is None:
                raise missing(f"{here}.schema")
            return Asked(
                _schema(given.json_schema.schema, bool(given.json_schema.strict), f"{here}.schema"), f"{here}.schema"
            )
        case unknown:
            raise RequestError(
                f"Invalid value for '{param}.type': {unknown!r}; use 'text', 'json_object' or 'json_schema'.",
                param=f"{param}.type",
            )


def _structured_outputs(value: Any, param: str) -> Asked | None:
    given = _decoded(value, StructuredOutputs, param)
    names = [name for name in StructuredOutputs.__struct_fields__ if getattr(given, name) not in (None, False)]
    only_one([f"{param}.{name}" for name in names])
    if not names:
        return None
    if given.json_object:
        return Asked(Grammar("json_object"), f"{param}.json_object")
    return _READERS_WITHIN[names[0]](getattr(given, names[0]), f"{param}.{names[0]}")


def _json(value: Any, param: str) -> Asked:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            raise RequestError(f"'{param}' is not valid JSON: {error}.", param=param) from None
    if not isinstance(value, dict):
        raise RequestError(f"'{param}' must be a JSON schema: an object, or its text.", param=param)
    return Asked(_schema(value, False, param), param)  # type: ignore[arg-type]


def _regex(value: Any, param: str) -> Asked:
    return Asked(Grammar("regex", _text(value, param)), param)


def _grammar(value: Any, param: str) -> Asked:
    return Asked(Grammar("lark", _text(value, param)), param)


def _choice(value: Any, param: str) -> Asked:
    texts = _decoded(value, list[str], param)
    if not texts or not all(texts):
        raise RequestError(f"'{param}' must be a list of one text or more, none of them empty.", param=param)
    return Asked(Grammar("choice", msgspec.json.encode(texts).decode()), param)


_READERS: dict[str, Callable[[Any, str], Asked | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "json_schema": _json,
    "grammar": _grammar,
}
_READERS_WITHIN = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}


def _schema(schema: dict[str, Any], strict: bool, param: str) -> Grammar:
    """Where a schema need not be kept to the letter, a `oneOf` whose parts may overlap is served as `anyOf`."""
    if deeper(schema, MAX_DEPTH):
        raise RequestError(
            f"'{param}' is nested more than {MAX_DEPTH} levels deep; use '$defs' and '$ref' to flatten it.",
            param=param,
            code="invalid_grammar",
        )
    if not strict:
        own = schema.get("x-guidance")
        schema = schema | {"x-guidance": {"coerce_one_of": True} | (own if isinstance(own, dict) else {})}  # type: ignore[operator]
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _decoded(value: Any, kind: Any, param: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at `$")
        where = param + place.rstrip("`")
        raise RequestError(f"Invalid value for '{where}': {what}.", param=where, code="invalid_type") from None


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"'{param}' must be a text.", param=param, code="invalid_type")
    return value
