"""Decoding of request bodies by msgspec: a wrong type is a 400 that names the field, as the client named it.

Unknown fields inside messages, tools and other nested objects are ignored: their structs don't forbid them. A struct
of a whole body has `forbid_unknown_fields`, and `decode_request` looks at a body a second time only where it has one:
`tolerance.TABLE` says how the field is treated; one that it lacks is reported by `Warnings.ignore`.

A parser that drops something else of a request calls `warnings.add("what, and why", "param")` on the `Warnings` it was
given (`Caller.warnings`). They become the response's `Warning` header and one log line, and with `--strict` a 400.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import msgspec
import msgspec.inspect

from api.schemas.tolerance import TABLE, Alias, Hint, Unsupported
from control.errors import RequestError


def missing(name: str) -> RequestError:
    """The error for a field that is not there."""
    return RequestError(f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")


def refusal(name: str, remedy: str = "Remove it from the request.") -> RequestError:
    """The error for a field or a value that is not served."""
    return RequestError(
        f"'{name}' is not supported by this server. {remedy}",
        param=name,
        code="unsupported_parameter",
    )


# Names and texts of one header, and the characters of each: names are as many and as long as the client made them.
_MOST = 8
_LONGEST_NAME = 64
_LONGEST_TEXT = 200
_UNSAFE = re.compile(r"[^ !#-\[\]-~]")
"""Characters that a quoted text in a header can't have: control characters, quotes, backslashes, all beyond ASCII."""


class Warnings:
    """Collects the warnings about one request. With `strict` the first one is a RequestError instead."""

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: list[str] = []
        self._texts: list[str] = []
        self._more = 0

    def ignore(self, field: str) -> None:
        """An unknown field was ignored."""
        if self.strict:
            raise RequestError(
                f"Unrecognized request argument supplied: {field}. Remove it, or see the API reference for what is "
                "served.",
                param=field,
                code="unknown_parameter",
            )
        if len(self._names) < _MOST:
            self._names.append(_safe(field, _LONGEST_NAME))
        else:
            self._more += 1

    def add(self, text: str, param: str | None = None) -> None:
        """A part of the request has no effect; `text` says which and why, `param` names it where it is refused."""
        if self.strict:
            raise RequestError(text, param=param, code="unsupported_parameter")
        if len(self._texts) < _MOST and (safe := _safe(text, _LONGEST_TEXT)) not in self._texts:
            self._texts.append(safe)

    @property
    def texts(self) -> list[str]:
        """All warnings, safe for a header and bounded in number and length."""
        if not self._names:
            return self._texts
        more = f" and {self._more} more" if self._more else ""
        return [f"Unknown fields were ignored: {', '.join(self._names)}{more}.", *self._texts]

    @property
    def headers(self) -> dict[str, str]:
        """The `Warning` header of the response; empty without warnings."""
        texts = self.texts
        return {"warning": ", ".join(f'299 furrow "{text}"' for text in texts)} if texts else {}


def _safe(text: str, longest: int) -> str:
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return _UNSAFE.sub("?", cut)


Names = dict[str, str]
"""The client's names of a chat request's parameters, whole or as patterns, which begin with ^."""


@contextmanager
def naming(names: Names) -> Generator[None]:
    """A RequestError of the block gets its parameter under the name that the client used."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        error.param = _client_name(param, names) or error.param
        if error.param != param:
            error.args = (str(error).replace(f"'{param}'", f"'{error.param}'"),)
        raise


def _client_name(param: str, names: Names) -> str:
    if param in names:
        return names[param]
    ours = next((ours for ours in names if ours.startswith("^") and re.match(ours, param)), None)
    return param if ours is None else re.sub(ours, names[ours], param)


T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_PATH = re.compile(r"^(?P<problem>.*?)(?: - at (?:`key` in )?`\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<field>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<field>[^`]*)`$")

_STEP = re.compile(r"\.?(\w+)|(\[[^\]]*\])")
_HALF_CHARACTER = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)

_UNKNOWN_CODE = "unknown_parameter"

_BYTE = re.compile(r"\(byte (\d+)\)")
_AROUND = 16
_MOST_WHOLE = 2**53
"""Floats up to this one are exact integers."""
_LONGEST_ERROR = 1000


def decode_body(body: bytes, type_: type[T]) -> T:
    """Decode a JSON body; raise RequestError naming the field at fault in `param`."""
    body = body.removeprefix(codecs.BOM_UTF8)  # some platforms write it in front of all that they write
    if not body.strip():
        raise RequestError("The request has no body; send a JSON object with Content-Type: application/json.")
    try:
        try:
            return msgspec.json.decode(body, type=type_)
        except msgspec.ValidationError as error:
            if "got `float`" not in str(error):
                raise
            return msgspec.json.decode(msgspec.json.encode(_whole_numbers(msgspec.json.decode(body))), type=type_)
    except msgspec.ValidationError as error:
        raise _explain(error, type_) from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply. Send a flatter one.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        if half := _half_character(body, str(error)):
            raise RequestError(
                f"The request body is not valid JSON: {half[0].decode()} is half of a surrogate pair, which is no "
                "character. Send both halves, or the character itself in UTF-8.",
                code="invalid_json",
            ) from None
        cause = "it is UTF-16; send UTF-8" if body.startswith(_UTF_16) else str(error)
        raise RequestError(f"The request body is not valid JSON: {cause}.", code="invalid_json") from None


def decode_request(body: bytes, type_: type[S], warnings: Warnings | None) -> S:
    """As `decode_body`, for a client's request: unknown fields go to `warnings`; without these they are refused."""
    try:
        return decode_body(body, type_)
    except RequestError as error:
        if error.code != _UNKNOWN_CODE:
            raise
    return decode_body(_served_fields(body, type_, warnings or Warnings(strict=True)), type_)


def _served_fields(body: bytes, type_: type[msgspec.Struct], warnings: Warnings) -> bytes:
    """The body with the fields that its type has. Raises RequestError for a field that is refused."""
    members = decode_body(body, dict[str, msgspec.Raw])
    fields = frozenset(type_.__struct_encode_fields__)
    for name in [name for name in members if name not in fields]:
        value = members.pop(name)
        treatment = TABLE.get(name)
        if treatment is None:
            warnings.ignore(name)
        elif isinstance(treatment, Alias):
            _rename(members, name, value, next((to for to in treatment.to if to in fields), None), warnings)
        elif not isinstance(treatment, Hint) and msgspec.json.decode(value) not in (None, *treatment.neutral):
            if isinstance(treatment, Unsupported):
                raise refusal(name, treatment.remedy)
            warnings.add(treatment.text, name)
    return msgspec.json.encode(members)


def _rename(members: dict[str, msgspec.Raw], name: str, value: msgspec.Raw, to: str | None, warnings: Warnings) -> None:
    """Put a value under the endpoint's name for it. Raises RequestError where another value is there already."""
    if to is None:
        warnings.ignore(name)
    elif bytes(value) != b"null":
        if bytes(members.get(to, value)) not in (b"null", bytes(value)):
            raise RequestError(f"'{name}' and '{to}' are both set and differ; send one of them.", param=name)
        members[to] = value


def _whole_numbers(value: Any) -> Any:
    """The value with integers in place of floats without a fraction: 1.0 is an integer in JSON Schema."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < _MOST_WHOLE else value
    if isinstance(value, list):
        return [_whole_numbers(element) for element in cast(list[Any], value)]
    if isinstance(value, dict):
        return {name: _whole_numbers(member) for name, member in cast(dict[str, Any], value).items()}
    return value


def _half_character(body: bytes, error: str) -> re.Match[bytes] | None:
    """Half of a surrogate pair at the place where decoding ended."""
    position = _BYTE.search(error)
    place = int(position[1]) if position is not None else len(body)
    return _HALF_CHARACTER.search(body, max(0, place - _AROUND), place + _AROUND)


def convert_part(value: Any, type_: type[T], at: str) -> T:
    """Check one part of a body that was decoded loosely; `at` is its place, as `input[0]`. Raises as `decode_body`."""
    try:
        return msgspec.convert(value, type_, str_keys=True)
    except msgspec.ValidationError as error:
        raise _explain(error, type_, at) from None


def _explain(error: msgspec.ValidationError, type_: type, at: str = "") -> RequestError:
    text = str(error)
    if len(text) > _LONGEST_ERROR:  # it has a member's name, as long as the client made it
        text = f"{text[: _LONGEST_ERROR // 2]}…{text[-_LONGEST_ERROR // 2 :]}"
    match = _PATH.match(text)
    assert match is not None  # the pattern matches any text
    problem = match["problem"]
    inner = (match["path"] or "").lstrip(".")
    path = _join(at, inner) if inner else at
    if unknown := _UNKNOWN.match(problem):
        name = _join(path, unknown["field"])
        return RequestError(
            f"Unrecognized request argument supplied: {name}. Remove it, or see the API reference for what is served.",
            param=name,
            code=_UNKNOWN_CODE,
        )
    if absent := _MISSING.match(problem):
        return missing(_join(path, absent["field"]))
    if problem.startswith("Invalid enum value"):
        problem += f"; use one of {', '.join(repr(value) for value in _choices(type_, inner))}"
    where = f" for '{path}'" if path else ""
    return RequestError(f"Invalid value{where}: {problem}.", param=path or None, code="invalid_type")


def _choices(type_: type, path: str) -> list[Any]:
    """The values that the field at `path`, as `messages[0].role`, may have."""
    types = [msgspec.inspect.type_info(type_)]
    for field, _ in _STEP.findall(path):
        types = [inner for outer in types for inner in _inside(outer, field)]
    return [value for kind in types if isinstance(kind, msgspec.inspect.LiteralType) for value in kind.values]


def _inside(outer: msgspec.inspect.Type, field: str) -> list[msgspec.inspect.Type]:
    """The types of the named field, or of an element where there is no name: the members of its union."""
    if isinstance(outer, msgspec.inspect.StructType):
        inner = [member.type for member in outer.fields if member.encode_name == field]
    elif isinstance(outer, msgspec.inspect.ListType) and not field:
        inner = [outer.item_type]
    else:
        inner = []
    return [
        kind
        for member_type in inner
        for kind in (member_type.types if isinstance(member_type, msgspec.inspect.UnionType) else (member_type,))
    ]


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field
