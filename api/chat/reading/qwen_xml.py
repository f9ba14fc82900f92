"""Qwen3-Coder: `<tool_call><function=NAME><parameter=KEY>value</parameter>…</function></tool_call>`.

The format has no types: a value is text, unless the tool's schema says that the parameter is something else. Then it is
JSON where it reads as JSON, and text where it does not.
"""

from __future__ import annotations

import json
import re
from typing import Any

from api.chat.piece import Piece
from api.chat.reading.calls import CallParser
from control.text.text import begun

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
FUNCTION = "<function="
END_FUNCTION = "</function>"
PARAMETER = "<parameter="
END_PARAMETER = "</parameter>"
_NAME = re.compile(r"[^<>\s]{1,256}")
_NAME_CHARACTERS = 256
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Models write Python's names for JSON's."""


class QwenXmlParser(CallParser):
    triggers = (OPEN, FUNCTION)

    def _open(self, trigger: str) -> None:
        if trigger == FUNCTION:
            self._state = self._name
        else:
            self._state = self._opened

    def _opened(self, piece: Piece) -> bool:
        start = self._held.lstrip()
        if _waits(start, FUNCTION):
            return False
        if not start.startswith(FUNCTION):
            return self._refuse(piece)
        skipped = len(self._held) - len(start) + len(FUNCTION)
        self._raw += self._held[:skipped]
        self._held = self._held[skipped:]
        self._state = self._name
        return True

    def _name(self, piece: Piece) -> bool:
        name, closed, rest = self._held.partition(">")
        if not closed and len(name) <= _NAME_CHARACTERS and (not name or _NAME.fullmatch(name)):
            return False
        if not closed or not _NAME.fullmatch(name):
            return self._refuse(piece)
        self._held = rest
        self._raw = ""
        self._function = name
        self._parameters = 0
        self._calls.begin(piece, name)
        self._called()
        self._state = self._body
        return True

    def _body(self, piece: Piece) -> bool:
        """Between parameters."""
        self._held = held = self._held.lstrip()
        if _waits(held, PARAMETER) or _waits(held, END_FUNCTION):
            return False
        key, closed, rest = held.removeprefix(PARAMETER).partition(">")
        if held.startswith(PARAMETER) and not closed and len(key) <= _NAME_CHARACTERS:
            return False
        if not (held.startswith(PARAMETER) and closed and len(key) <= _NAME_CHARACTERS):
            # The end of the function, or something else in its place: the call is over, and what is here is text.
            self._calls.argue(piece, "}" if self._parameters else "{}")
            self._held = held.removeprefix(END_FUNCTION)
            self._state = self._close
            return True
        self._literal = key in self._calling.literal.get(self._function, ())
        self._calls.argue(piece, (", " if self._parameters else "{") + json.dumps(key, ensure_ascii=False) + ": ")
        self._parameters += 1
        self._held = rest
        self._fresh = True
        self._state = self._value
        return True

    def _value(self, piece: Piece) -> bool:
        """A text goes out as it comes; what may be JSON is read at its end. One line break at each end is no part."""
        if self._fresh and self._held:
            self._held = self._held.removeprefix("\n")
            self._fresh = False
            self._calls.argue(piece, "" if self._literal else '"')
        text, closed, rest = self._held.partition(END_PARAMETER)
        if closed:
            text = text.removesuffix("\n")
            self._calls.argue(piece, _literal(text) if self._literal else _quoted(text) + '"')
            self._held = rest
            self._state = self._body
            return True
        if not self._literal and not self._fresh:
            cut = len(text) - begun(text, ("\n" + END_PARAMETER, END_PARAMETER))
            self._calls.argue(piece, _quoted(text[:cut]))
            self._held = text[cut:]
        return False

    def _close(self, piece: Piece) -> bool:
        held = self._held.lstrip()
        if _waits(held, CLOSE):
            return False
        self._held = held.removeprefix(CLOSE)
        self._state = self._text
        return True

    def _give_up(self, piece: Piece) -> None:
        if self._state in (self._opened, self._name):
            self._refuse(piece)
        elif self._state == self._value:
            self._calls.argue(piece, _literal(self._take()) if self._literal else _quoted(self._take()))
        elif self._state in (self._body, self._close):
            self._held = ""  # a tag that was cut short


def may_be_text(schema: Any) -> bool:
    """True if a text is a value of the schema; a schema without a type allows it."""
    if not isinstance(schema, dict):
        return True
    kinds: Any = schema.get("type")
    if kinds is not None:
        return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)
    for name in ("anyOf", "oneOf"):
        if isinstance(schema.get(name), list):
            return any(may_be_text(choice) for choice in schema[name])
    if isinstance(schema.get("enum"), list):
        return any(isinstance(value, str) for value in schema["enum"])
    return "$ref" not in schema


def _waits(text: str, tag: str) -> bool:
    """True if `text` may still become the tag."""
    return len(text) < len(tag) and tag.startswith(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _literal(text: str) -> str:
    """A value of a parameter that is no text, as JSON."""
    value = text.strip()
    try:
        json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _CONSTANTS.get(value) or json.dumps(text, ensure_ascii=False)
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
