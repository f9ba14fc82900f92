"""Calls as a model of a form writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from api.chat.reading.form import CallForm, CallShape

Call = tuple[str, Mapping[str, Any] | str]
"""A function's name and its arguments, as text where they are no object."""

_HOLE = re.compile(r"\{(name|id|index|arguments|parameters|key|value|text|type)\}")
_PYTHON = {True: "True", False: "False", None: "None"}


def written_calls(form: CallForm, calls: Sequence[Call], first: int = 0) -> str:
    """The text of these calls; `first` is the number of the first one among all of the conversation."""
    shape = form.shape
    opened = "" if shape.bare or not form.open else form.open[0]
    closed = "" if shape.bare or not form.close else form.close[0]
    texts = [_call(shape, name, arguments, first + place) for place, (name, arguments) in enumerate(calls)]
    if shape.listed:
        opened, closed = opened + "[", "]" + closed
    if shape.between and (shape.listed or not shape.bare):
        return opened + shape.between.join(texts) + closed
    return (shape.between or shape.apart).join(opened + text + closed for text in texts)


def _call(shape: CallShape, name: str, arguments: Mapping[str, Any] | str, index: int) -> str:
    call = shape.call.replace(shape.optional, "") if shape.optional else shape.call
    holes = {"name": name, "id": f"{index:09d}", "index": str(index)}

    def fill(hole: re.Match[str]) -> str:
        return holes[hole[1]] if hole[1] in holes else _arguments(shape, arguments)

    return _HOLE.sub(fill, call)


def _arguments(shape: CallShape, arguments: Mapping[str, Any] | str) -> str:
    if isinstance(arguments, str):
        return arguments
    match shape.kind:
        case "parameters":
            return "".join(_parameter(shape, key, value) for key, value in arguments.items())
        case "relaxed":
            return _relaxed(arguments, shape.quote)
        case "python":
            return ", ".join(f"{key}={_python(value)}" for key, value in arguments.items())
        case _:
            return json.dumps(arguments, ensure_ascii=False)


def _parameter(shape: CallShape, key: str, value: Any) -> str:
    text = isinstance(value, str)
    kind = "string" if text else "boolean" if isinstance(value, bool) else "null" if value is None else "number"
    kind = "object" if isinstance(value, dict) else "array" if isinstance(value, list) else kind
    holes = {"key": key, "value": value if text else json.dumps(value, ensure_ascii=False)}
    holes |= {"text": "true" if text else "false", "type": kind}
    return _HOLE.sub(lambda hole: holes[hole[1]], shape.parameter)


def _relaxed(value: Any, quote: str) -> str:
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_relaxed(element, quote)}" for key, element in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_relaxed(element, quote) for element in value) + "]"
    return quote + value + quote if isinstance(value, str) else json.dumps(value)


def _python(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {_python(element)}" for key, element in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    if value is None or isinstance(value, bool):
        return _PYTHON[value]
    return json.dumps(value, ensure_ascii=False)
