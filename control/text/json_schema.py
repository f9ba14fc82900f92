"""JSON schemas as people's libraries write them, in the keywords that llguidance enforces.

The meaning stays: a keyword is only replaced by others that allow the same values. Where there are none the keyword
stays, and the library refuses it by name.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterator
from typing import Any

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
    for one in _schemas(schema):
        _format(one)
        _unique_items(one, schema)
        _property_names(one, schema)
        if one.get("unevaluatedProperties") is False and not any(word in one for word in _IN_PLACE):
            del one["unevaluatedProperties"]
            one["additionalProperties"] = False
    return schema


def _schemas(root: Any) -> Iterator[Schema]:
    """Every schema inside the schema, itself first; without recursion, because a hostile one is deep."""
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict):
            continue
        yield one
        waiting += [one[word] for word in _SINGLE if word in one]
        waiting += [part for word in _LISTS if isinstance(one.get(word), list) for part in one[word]]
        waiting += [part for word in _MAPS if isinstance(one.get(word), dict) for part in one[word].values()]


def _format(one: Schema) -> None:
    """Drop an unknown format. A known one says what the look-around of its pattern says, as zod writes both."""
    name = one.get("format")
    if not isinstance(name, str):
        return
    if _UUID.fullmatch(name):
        one["format"] = "uuid"
    elif name not in FORMATS:
        del one["format"]
    elif isinstance(one.get("pattern"), str):
        one["pattern"] = _LOOK_AROUND.sub("", one["pattern"])


def _unique_items(one: Schema, root: Any) -> None:
    """An array of different values out of a few is one of a few arrays."""
    unique = one.get("uniqueItems")
    if unique is False or (unique is True and one.get("maxItems") in (0, 1)):
        del one["uniqueItems"]
    elif unique is True:
        values = _values(one.get("items"), root)
        least = one.get("minItems", 0)
        most = one.get("maxItems", len(values or ()))
        if values is None or not isinstance(least, int) or not isinstance(most, int):
            return
        sizes = range(least, min(most, len(values)) + 1)
        if 0 < sum(math.perm(len(values), size) for size in sizes) <= MOST_ARRAYS:
            arrays = [list(array) for size in sizes for array in itertools.permutations(values, size)]
            for word in ("uniqueItems", "items", "minItems", "maxItems", "type"):
                one.pop(word, None)
            one["enum"] = arrays


def _property_names(one: Schema, root: Any) -> None:
    """Names that are any text need no keyword; a few names are properties; names by a pattern are patternProperties."""
    names = one.get("propertyNames")
    if names is True or names in ({}, {"type": "string"}):
        del one["propertyNames"]
        return
    value = one.get("additionalProperties", True)
    allowed = _values(names, root)
    if allowed is not None and "patternProperties" not in one and isinstance(one.get("properties", {}), dict):
        properties = one.get("properties", {})
        one["properties"] = {name: properties.get(name, value) for name in allowed if isinstance(name, str)}
    elif isinstance(names, dict) and names.keys() - {"type"} == {"pattern"} and not one.keys() & {*_MAPS}:
        one["patternProperties"] = {names["pattern"]: value}
    else:
        return
    del one["propertyNames"]
    one["additionalProperties"] = False


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
