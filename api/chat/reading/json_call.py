"""One call written as a JSON object, `{"name": …, "arguments": {…}}`, read while it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Literal, cast

from api.chat.piece import Piece
from api.chat.reading.calls import Calls

_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)+)"\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The usual beginning, after which the arguments can be passed on as they come."""
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_NO_OBJECT = re.compile(r'\s*(?:[^\s{]|\{\s*[^\s"])')
_KEYS = ("name", "arguments", "parameters", "type", "id")
_HEAD_CHARACTERS = 1024
"""Where the beginning is longer than this, the call is read as a whole at its end."""
_OUTSIDE_STRINGS = frozenset('{}[]:,"+-. \t\r\n0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ')


class _Brackets:
    """Finds the end of a JSON object or list in a text that comes in pieces; it checks no grammar."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = False

    def scan(self, text: str) -> int | None:
        """How much of `text` belongs to the value, None where all of it does and it goes on.

        A character that JSON has only in strings ends the value before it.
        """
        for at, character in enumerate(text):
            if self._string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._string = False
            elif character == '"':
                self._string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
            elif character not in _OUTSIDE_STRINGS:
                return at
        return None


class JsonCall:
    """Reads one object. `push` returns the text after it once it is over; if then nothing `begun`, that is all text."""

    def __init__(self, calls: Calls, names: Collection[str] | None = None) -> None:
        """With `known` names, an object that calls something else is no call."""
        self._calls = calls
        self._known = names
        self._state: Literal["head", "arguments", "tail", "extra"] = "head"
        self._brackets = _Brackets()
        self.held = ""
        """The text that was read without effect so far."""
        self.begun = False

    def push(self, text: str, piece: Piece) -> str | None:
        if self._state == "head":
            rest = self._head(text, piece)
            if rest is None or self._state == "head":
                return rest
            text = rest
        if self._state == "arguments":
            end = self._brackets.scan(text)
            self._calls.argue(piece, text[:end])
            if end is None:
                return None
            text = text[end:]
            self._state = "tail"
        if self._state == "tail":
            return self._tail(text)
        end = self._brackets.scan(text)
        return None if end is None else text[end:]

    def _head(self, text: str, piece: Piece) -> str | None:
        """The rest where the arguments have begun or the object is over, None while neither can be told."""
        self.held += text
        start = self.held[:_HEAD_CHARACTERS]
        key = _FIRST_KEY.match(start)
        if _NO_OBJECT.match(start) or (key is not None and key[1] not in _KEYS):
            return self._over()
        if head := _HEAD.match(start):
            name = _value(f'"{head["name"]}"')
            if not isinstance(name, str) or not self._knows(name):
                return self._over()
            self._begin(piece, name)
            rest = self.held[head.end() :]
            self.held = ""
            self._state = "arguments"
            self._brackets = _Brackets()
            return rest
        end = self._brackets.scan(text)
        if end is None:
            return None
        whole = len(self.held) - len(text) + end
        return self._whole(self.held[:whole], self.held[whole:], piece)

    def _whole(self, text: str, rest: str, piece: Piece) -> str:
        """A complete object whose beginning was an unusual one."""
        value = _value(text)
        members = cast(dict[str, Any], value) if isinstance(value, dict) else {}
        name = members.get("name")
        arguments = members.get("arguments", members.get("parameters"))
        if not isinstance(name, str) or not name or not self._knows(name):
            return self._over()
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        self._begin(piece, name)
        self._calls.argue(piece, arguments)
        self.held = ""
        return rest

    def _tail(self, text: str) -> str | None:
        """After the arguments the object closes; other members, if any, are passed over."""
        self.held += text
        rest = self.held.lstrip()
        if rest.startswith("}"):
            return rest[1:]
        if not rest or (rest[0] == "," and not rest[1:].strip()):
            return None
        if rest[0] != "," or not rest[1:].lstrip().startswith('"'):
            return rest
        self._state = "extra"
        self._brackets = _Brackets()
        self._brackets.scan("{")
        end = self._brackets.scan(rest)
        return None if end is None else rest[end:]

    def _begin(self, piece: Piece, name: str) -> None:
        self.begun = True
        self._calls.begin(piece, name)

    def _knows(self, name: str) -> bool:
        return self._known is None or name in self._known

    def _over(self) -> str:
        held = self.held
        self.held = ""
        return held


def _value(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
