"""Strict decoding of request bodies: a wrong type or an unknown field is a 400 that names it.

The web framework would convert leniently (`"n": "2"` would pass), so bodies are decoded here, by msgspec alone.
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec

from control.errors import RequestError

T = TypeVar("T")

_PATH = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`$")


def decode_body(body: bytes, type_: type[T]) -> T:
    """Decode a JSON body; raise RequestError naming the field at fault in `param`."""
    if not body.strip():
        raise RequestError("The request has no body; send a JSON object with Content-Type: application/json.")
    try:
        return msgspec.json.decode(body, type=type_)
    except msgspec.ValidationError as error:
        raise _explain(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None


def _explain(error: msgspec.ValidationError) -> RequestError:
    match = _PATH.match(str(error))
    assert match is not None  # the pattern matches any text
    what, path = match["what"], (match["path"] or "").lstrip(".")
    if unknown := _UNKNOWN.match(what):
        name = _join(path, unknown["field"])
        return RequestError(
            f"Unrecognized request argument supplied: {name}. Remove it, or see the API reference for what is served.",
            param=name,
            code="unknown_parameter",
        )
    if missing := _MISSING.match(what):
        name = _join(path, missing["field"])
        return RequestError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    where = f" for '{path}'" if path else ""
    return RequestError(f"Invalid value{where}: {what}.", param=path or None, code="invalid_type")


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field
