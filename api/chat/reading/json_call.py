"""One call written as a JSON object, `{"name": …, "arguments": {…}}`, read while it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any, Literal, cast

from api.chat.piece import Piece
from api.chat.reading.calls import Calls

_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)*"(?:name|tool_name)"\s*:\s*'
    r'"(?P<name>(?:[^"\\]|\\.)+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The usual beginning, after which the arguments can be passed on as they come."""
_KEYED_HEAD = re.compile(r'\s*\{\s*"(?P<name>(?:[^"\\]|\\.)+)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_NO_OBJECT = re.compile(r'\s*(?:[^\s{]|\{\s*[^\s"])')
_KEYS = ("name", "tool_name", "arguments", "parameters", "type", "id", "tool_call_id")
_HEAD_CHARACTERS = 1024
"""The longest beginning of a call that is read as it comes; a call with a longer one is read as a whole at its end."""
_BLANKS = 256
"""The most white space before another member."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_OUTSIDE_STRINGS = frozenset('{}[]:,"+-. \t\r\n0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ')


class Brackets:
    """Finds the end of a JSON object or list in a text that comes in pieces; it checks no grammar."""

    def __init__(self) -> None:
        self._depth = 0
        self._string = self._escaped = False

    def scan(self, text: str) -> int | None:
        """The number of characters of `text` that belong to the value, None if all do and the value goes on.

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

    def __init__(self, calls: Calls, names: Collection[str] | None = None, *, keyed: bool = False) -> None:
        """With `names`, an object that calls something else is no call. `keyed`: the name is the object's only key."""
        self._calls = calls
        self._names = names
        self._keyed = keyed
        self._state: Literal["head", "arguments", "tail", "extra"] = "head"
        self._brackets = Brackets()
        self._parts: list[str] = []
        """The text that was read without effect so far."""
        self._start = ""
        """The beginning of it, as much as is searched for the head."""
        self._ending = ""
        """The text after the arguments, without white space at its beginning."""
        self.begun = False

    @property
    def consumed(self) -> str:
        return "".join(self._parts)

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
            text, self._state = text[end:], "tail"
        if self._state == "tail":
            return self._tail(text)
        end = self._brackets.scan(text)
        return None if end is None else text[end:]

    def _head(self, text: str, piece: Piece) -> str | None:
        """The rest where the arguments have begun or the object is over, None while neither is certain."""
        self._parts.append(text)
        if len(self._start) < _HEAD_CHARACTERS:
            self._start = (self._start + text)[:_HEAD_CHARACTERS]
            key = _FIRST_KEY.match(self._start)
            if _NO_OBJECT.match(self._start) or (key is not None and key[1] not in _KEYS and not self._keyed):
                return self._over()
            if head := (_KEYED_HEAD if self._keyed else _HEAD).match(self._start):
                name = _value(f'"{head["name"]}"')
                if not isinstance(name, str) or not self._knows(name):
                    return self._over()
                self._begin(piece, name)
                self._state, self._brackets = "arguments", Brackets()
                return self._over()[head.end() :]
        end = self._brackets.scan(text)
        if end is None:
            return self._over() if self._keyed and len(self._start) == _HEAD_CHARACTERS else None
        consumed = self._over()
        whole = len(consumed) - len(text) + end
        rest = self._whole(consumed[:whole], consumed[whole:], piece)
        return consumed if rest is None else rest

    def _whole(self, text: str, rest: str, piece: Piece) -> str | None:
        """The rest after a complete object whose beginning was an unusual one; None where that is no call."""
        value = _value(text)
        members = cast(dict[str, Any], value) if isinstance(value, dict) else {}
        name = members.get("name", members.get("tool_name"))
        arguments = members.get("arguments", members.get("parameters"))
        if not isinstance(name, str) or not name or not self._knows(name):
            return None
        if not isinstance(arguments, str):
            arguments = as_json({} if arguments is None else arguments)
        self._begin(piece, name)
        self._calls.argue(piece, arguments)
        return rest

    def _tail(self, text: str) -> str | None:
        """After the arguments the object closes; other members, if any, are passed over."""
        self._ending = rest = (self._ending + text).lstrip()
        if rest.startswith("}"):
            return rest[1:]
        following = rest[1:].lstrip()
        blanks = len(rest) - 1 - len(following)
        if not rest or (rest[0] == "," and not following and blanks <= _BLANKS):
            return None
        if rest[0] != "," or not following.startswith('"') or blanks > _BLANKS:
            return rest
        self._state, self._brackets = "extra", Brackets()
        self._brackets.scan("{")
        end = self._brackets.scan(rest)
        return None if end is None else rest[end:]

    def end(self, piece: Piece) -> None:
        """Nothing is left to do: a call that has begun was passed on as it came."""

    def _begin(self, piece: Piece, name: str) -> None:
        self.begun = True
        self._calls.begin(piece, name)

    def _knows(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _over(self) -> str:
        consumed = self.consumed
        self._parts.clear()
        return consumed


def as_json(value: Any) -> str:
    """A value as JSON text; halves of a character, which UTF-8 has not, are written as escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
