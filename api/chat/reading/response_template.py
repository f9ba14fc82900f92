"""From a `response_template`, as transformers defines it, to a form.

A template may come from a model's authors: it is bounded in size, and its patterns are never run. They are read as
text with holes, and a pattern that is more than that is refused (FormError).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any, cast

import msgspec

from api.chat.reading.form import CallForm, CallShape, Channels, Form, Ids, Pair

MOST_BYTES = 16_384
"""The size of a template as JSON is bounded, because it travels with each request of its model."""
_MARK_CHARACTERS = 128
_PATTERN_CHARACTERS = 512
_MARKS = 8
_REASONING = ("reasoning_content", "reasoning", "thinking")
_STOPS = ("{arguments}", "{parameters}")


class FormError(ValueError):
    """A response template can't be read; the message says what is wrong."""


def form_of(name: str, template: Any) -> Form:
    """The form that a template describes. Raises FormError."""
    try:
        encoded = msgspec.json.encode(template)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormError(f"it can't be read: {error}") from error
    if len(encoded) > MOST_BYTES:
        raise FormError(f"it has {len(encoded)} bytes as JSON; at most {MOST_BYTES} are read")
    return _decoded(name, encoded)


@functools.lru_cache(maxsize=256)
def _decoded(name: str, encoded: bytes) -> Form:
    try:
        return _form(name, msgspec.json.decode(encoded))
    except (msgspec.ValidationError, re.error, RecursionError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise FormError(f"it can't be read: {str(error)[:200] or type(error).__name__}") from error


def _form(name: str, template: Any) -> Form:
    if not isinstance(template, dict) or not isinstance(template.get("fields"), dict) or not template["fields"]:
        raise FormError("'fields' must be an object with a field at least")
    if template.get("version", 1) != 1:
        raise FormError(f"version {template['version']!r:.40} is not known; 1 is")
    fields: dict[str, Any] = template["fields"]
    for key, field in fields.items():
        if not isinstance(field, dict):
            raise FormError(f"the field {key!r:.40} must be an object")
    reasoning = [pair for key in _REASONING if key in fields for pair in _pairs(fields[key])]
    content = fields.get("content", {})
    around = [*_marks(content, "open"), *_marks(content, "close")]
    channels = template.get("channels")
    efforts = msgspec.convert(template.get("efforts", {}), dict[str, str])
    return Form(
        name=name,
        reasoning=reasoning,
        calls=_calls(fields["tool_calls"]) if "tool_calls" in fields else None,
        content=[mark for mark in around if mark],
        answer=msgspec.convert(template.get("answer", ("", "")), tuple[str, str]),
        prompted=msgspec.convert(template.get("prompted", ""), str)[:_MARK_CHARACTERS],
        channels=None if channels is None else msgspec.convert(channels, Channels),
        efforts=efforts,
        ids=msgspec.convert(template.get("ids", "any"), Ids),
    )


def _pairs(field: dict[str, Any]) -> list[Pair]:
    opens = _marks(field, "open")
    closes = _marks(field, "close")
    if not any(opens) and closes and closes[0].startswith("</"):
        opens = ["<" + closes[0].removeprefix("</")]  # the prompt opens it
    if not opens and not closes:
        return []
    if not opens or not closes:
        raise FormError("reasoning needs a mark that opens it and one that closes it")
    anywhere = bool(field.get("repeats"))
    return [Pair(opened, closes[min(place, len(closes) - 1)], anywhere) for place, opened in enumerate(opens)]


def _marks(field: dict[str, Any], key: str) -> list[str]:
    """The literal marks of a field; a pattern counts where it is a text."""
    value: Any = field.get(key)
    if value is None and f"{key}_pattern" in field:
        return [_outline(str(field[f"{key}_pattern"]), {}).strip()]
    marks: list[Any] = [] if value is None else value if isinstance(value, list) else [value]
    if len(marks) > _MARKS or not all(isinstance(mark, str) and 0 < len(mark) <= _MARK_CHARACTERS for mark in marks):
        raise FormError(f"{key!r} must be 1 to {_MARKS} texts of up to {_MARK_CHARACTERS} characters")
    return cast(list[str], marks)


def _calls(field: dict[str, Any]) -> CallForm:
    if field.get("content") == "calls":
        shapes = msgspec.convert(field["content_args"]["shapes"], list[CallShape])
        for shape in shapes:
            _check(shape)
        alone = bool(field["content_args"].get("alone"))
        return CallForm(_marks(field, "open"), _marks(field, "close"), shapes, alone)
    return _translated(field)


def _check(shape: CallShape) -> None:
    holes = [stop for stop in _STOPS if stop in shape.call]
    if shape.kind != "python" and len(holes) != 1:
        raise FormError(f"'call' needs {_STOPS[0]} or {_STOPS[1]} once, not {shape.call!r:.80}")
    if shape.kind == "parameters" and not {"{key}", "{value}"} <= set(re.findall(r"\{\w+\}", shape.parameter)):
        raise FormError(f"'parameter' needs {{key}} and {{value}}, not {shape.parameter!r:.80}")
    if shape.kind not in ("object", "python") and "{name}" not in shape.call:
        raise FormError(f"'call' needs {{name}}, not {shape.call!r:.80}")


def _translated(field: dict[str, Any]) -> CallForm:
    """The calls of a field in transformers' own words: `json` or `xml-inline`, with captures and a transform."""
    name, arguments = _paths(field)
    if "open_pattern" in field:
        outline = _outline(str(field["open_pattern"]), {name: "{name}", "id": "{id}"}, whole=True)
        opened, head = _split(outline)
        opens = [opened]
    else:
        opens = _marks(field, "open")
        head = ""
    closes = _marks(field, "close")
    args: Any = field.get("content_args") or {}
    match field.get("content", "text"):
        case "json" if "{name}" in head:
            if args.get("unquoted_keys") or args.get("string_delims"):
                quote = str((args.get("string_delims") or [['"']])[0][0])
                shape = CallShape(kind="relaxed", call=head + "{arguments}", quote=quote, skips=True)
            else:
                shape = CallShape(kind="json", call=head + "{arguments}", skips=True)
        case "json":
            listed = bool(field.get("transform_each"))
            call = f'{{"{_last(name)}": "{{name}}", "{_last(arguments)}": {{arguments}}}}'
            shape = CallShape(kind="object", call=call, listed=listed, between=", " if listed else "")
        case "xml-inline":
            tag = _outline(str(args.get("tag_pattern")), {"key": "{key}", "value": "{value}"}, whole=True)
            shape = CallShape(kind="parameters", call=head + "{parameters}", parameter=tag, skips=True)
        case other:
            raise FormError(f"calls of the content {other!r:.40} are not known")
    _check(shape)
    if not opens or not opens[0]:
        raise FormError("'tool_calls' needs a mark that opens it")
    return CallForm(opens, closes, [shape])


def _paths(field: dict[str, Any]) -> tuple[str, str]:
    """The placeholders of name and arguments in a field's transform."""
    transform: Any = field.get("transform")
    function: Any = transform.get("function", transform) if isinstance(transform, dict) else None
    if isinstance(function, dict):
        names = [str(function.get(key, "")).strip("{}") for key in ("name", "arguments")]
        return names[0], names[1]
    return "content.name", "content.arguments"


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def _split(outline: str) -> tuple[str, str]:
    """A mark that is one text, and what follows it: the outline is cut at its first white space, or before a hole."""
    hole = outline.find("{name}")
    cut = re.search(r"\s", outline[: hole if hole >= 0 else len(outline)])
    at = cut.start() if cut else hole if hole >= 0 else len(outline)
    return outline[:at], outline[at:]


def _outline(pattern: str, holes: dict[str, str], *, whole: bool = False) -> str:
    """A pattern as text with holes for its named groups; white space that may be there is written as it mostly is.
    Of choices the first is taken, and what may be missing is left out, unless the `whole` pattern is to be read.

    Raises FormError for a pattern that is more than a text.
    """
    if len(pattern) > _PATTERN_CHARACTERS:
        raise FormError(f"a pattern has {len(pattern)} characters; at most {_PATTERN_CHARACTERS} are read")
    parsed = re._parser.parse(pattern, re.DOTALL)  # type: ignore[attr-defined]
    groups = {number: name for name, number in parsed.state.groupdict.items()}
    out: list[str] = []
    _write(parsed, groups, holes, whole, out)
    return "".join(out)


def _write(nodes: Sequence[Any], groups: dict[int, str], holes: dict[str, str], whole: bool, out: list[str]) -> None:
    for operation, argument in nodes:
        kind = str(operation)
        if kind == "LITERAL":
            out.append(chr(argument))
        elif kind == "SUBPATTERN":
            number, _, _, inner = argument
            if number in groups:
                _hole(groups[number], holes, out)
            else:
                _write(inner, groups, holes, whole, out)
        elif kind in ("MAX_REPEAT", "MIN_REPEAT"):
            least, most, inner = argument
            if _is_space(inner):
                in_json = bool(out) and out[-1] in (":", ",")
                out.append(" " if in_json else "\n" if least or most > 1 else "")
            elif least > 0 or whole:
                raise FormError("a pattern repeats something that no named group holds")
        elif kind == "BRANCH" and not whole:
            _write(argument[1][0], groups, holes, whole, out)
        elif kind == "IN" and _is_space([(operation, argument)]):
            out.append(" ")
        elif kind not in ("AT", "ASSERT", "ASSERT_NOT"):
            raise FormError(f"a pattern has {kind.lower()!r}, which is not read")


def _hole(name: str, holes: dict[str, str], out: list[str]) -> None:
    if name not in holes:
        raise FormError(f"a pattern has a group {name!r:.40}, which is not used")
    out.append(holes[name])


def _is_space(nodes: Sequence[Any]) -> bool:
    text = str(list(nodes))
    return len(nodes) == 1 and ("CATEGORY_SPACE" in text or text in ("[(LITERAL, 10)]", "[(LITERAL, 32)]"))
