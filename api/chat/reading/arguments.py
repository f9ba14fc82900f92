"""Arguments of calls as JSON while they come: JSON, parameters between marks, and relaxed values."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, Protocol

from api.chat.reading.form import CallShape
from control.text.text_stream import partial_match_length

_KEY_CHARACTERS = 256
_HEAD_CHARACTERS = 2048
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
"""Models write Python's names for JSON's."""


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


def as_json(value: Any) -> str:
    """A value as JSON text; halves of a character, which UTF-8 has not, are written as escapes."""
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


class Arguments(Protocol):
    """Reads the arguments of one call."""

    def push(self, text: str) -> tuple[str, str | None]:
        """The next part of the arguments as JSON, and the text after them once they are over."""
        ...

    def end(self) -> str:
        """The answer is over: the rest of the arguments, which no push has returned."""
        ...


class JsonArguments:
    """A JSON object, which is passed on as it comes."""

    def __init__(self) -> None:
        self._brackets = Brackets()

    def push(self, text: str) -> tuple[str, str | None]:
        end = self._brackets.scan(text)
        return (text, None) if end is None else (text[:end], text[end:])

    def end(self) -> str:
        return ""


class Parameters:
    """Each argument between marks of its own, such as `<parameter=KEY>value</parameter>`.

    The form has no types: a value is text, unless the tool's schema, or the form itself, says that it is something
    else. Then it is JSON where it reads as JSON, and text where it does not.
    """

    def __init__(self, shape: CallShape, literal: frozenset[str]) -> None:
        """`literal`: the parameters that are no text."""
        before, _, after = shape.parameter.partition("{value}")
        self._parts = [part for part in re.split(r"(\{key\}|\{text\}|\{type\})|\s+", before) if part]
        self._open = self._parts[0]
        self._close = after.strip()
        self._line_before, self._line_after = before.endswith("\n"), after.startswith("\n")
        self._ends = ("\n" + self._close, self._close) if self._line_after else (self._close,)
        self._verbatim = shape.verbatim
        self._inside = False
        """True within the marks around a value."""
        self._names = literal
        self._state: Literal["between", "head", "value", "over"] = "between"
        self._pending = ""
        self._searched = 0
        self._count = 0

    @property
    def first(self) -> str:
        """The text with which the first of them begins."""
        return self._open

    def push(self, text: str) -> tuple[str, str | None]:
        self._pending += text
        out: list[str] = []
        while True:
            if self._state == "between":
                self._pending = self._pending.lstrip()
                if len(self._pending) < len(self._open) and self._open.startswith(self._pending):
                    break
                self._state = "head" if self._pending.startswith(self._open) else "over"
            if self._state == "head":
                head = self._head()
                if head is None and len(self._pending) < _HEAD_CHARACTERS:
                    break
                head = head or ""
                out.append(head)
                self._state = "value" if head else "over"
                self._searched = 0
            if self._state == "over":
                out.append("}" if self._count else "{}")
                rest, self._pending = self._pending, ""
                return "".join(out), rest
            if not self._value(out):
                break
        return "".join(out), None

    def end(self) -> str:
        rest, self._pending = self._pending, ""
        if self._state == "head":  # a key that is cut short
            return (", " if self._count else "{") + '"' + quoted(rest.removeprefix(self._open))
        if self._state != "value":
            return ""
        if self._fresh:
            return "" if self._literal else '"'
        if not self._literal:
            return quoted(rest)
        return rest if rest.lstrip().startswith(("[", "{")) else literal(rest)

    def _head(self) -> str | None:
        """The key as JSON; empty where there is none, None while that is unknown."""
        rest = self._pending
        key = ""
        text = ""
        for place, part in enumerate(self._parts):
            if part not in ("{key}", "{text}", "{type}"):
                rest = rest.lstrip() if place else rest
                if not rest.startswith(part):
                    return None if part.startswith(rest) else ""
                rest = rest[len(part) :]
                continue
            following = self._parts[place + 1] if place + 1 < len(self._parts) else "\n"
            value, separator, after = rest.partition(following)
            if not separator:
                return None if len(rest) <= _KEY_CHARACTERS else ""
            if len(value) > _KEY_CHARACTERS:
                return ""
            key, text = (value.strip(), text) if part == "{key}" else (key, value.strip())
            rest = following + after
        if len(self._pending) - len(rest) > _HEAD_CHARACTERS:
            return ""
        self._literal = text not in ("", "true", "string") or (not text and key in self._names)
        self._pending = rest
        self._fresh = True
        self._count += 1
        return (", " if self._count > 1 else "{") + as_json(key) + ": "

    def _value(self, out: list[str]) -> bool:
        """A text goes out as it comes; what may be JSON is read at its end. True once the value is over."""
        if self._fresh:
            if not self._pending or (
                self._verbatim and partial_match_length(self._pending, self._verbatim[:1]) == len(self._pending)
            ):
                return False
            if self._line_before:
                self._pending = self._pending.removeprefix("\n")
            self._inside = bool(self._verbatim) and self._pending.startswith(self._verbatim[0])
            if self._inside:
                self._pending = self._pending.removeprefix(self._verbatim[0])
            self._fresh = False
            out.append("" if self._literal else '"')
        close = self._verbatim[1] + self._close if self._inside else self._close
        at = self._pending.find(close, max(0, self._searched - len(close)))
        if at >= 0:
            text = self._pending[:at]
            text = text.removesuffix("\n") if self._line_after else text
            out.append(literal(text) if self._literal else quoted(text) + '"')
            self._pending, self._state = self._pending[at + len(close) :], "between"
            return True
        if self._literal:
            self._searched = len(self._pending)
            return False
        cut = len(self._pending) - partial_match_length(self._pending, (close,) if self._inside else self._ends)
        out.append(quoted(self._pending[:cut]))
        self._pending = self._pending[cut:]
        return False


_WORD = re.compile(r"[^\s,:={}\[\]()'\"<]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_ESCAPES = {"n": "\\n", "t": "\\t", "r": "\\r", "b": "\\b", "f": "\\f", "\\": "\\\\", "'": "'", '"': '\\"', "\n": ""}
_CODE_DIGITS = {"x": 2, "u": 4, "U": 8}
_WORD_CHARACTERS = 4096
_CLOSES = {"{": "}", "[": "]", "(": "]"}


class RelaxedArguments:
    """Values with bare keys, Python's names and quotes of their own; and the keyword arguments of a Python call.

    It begins at the bracket that opens the arguments, and is over behind the one that closes it.
    """

    def __init__(self, quote: str = "", *, keywords: bool = False) -> None:
        """`quote` is a mark around texts; `keywords`: the outermost bracket has `key=value`."""
        self._quotes = [mark for mark in (quote, '"', "'") if mark]
        self._raw = quote
        self._keywords = keywords
        self._stack: list[str] = []
        self._pending = ""
        self._quote = ""
        """The quote that is open."""
        self._key = False
        """True where a key is to come."""
        self._comma = False
        """True where a comma is to be written before the next value."""
        self._word = ""
        """A word that may be a key."""
        self._positional = 0

    def push(self, text: str) -> tuple[str, str | None]:
        self._pending += text
        out: list[str] = []
        rest: str | None = None
        while self._pending and rest is None:
            if self._quote:
                if not self._string(out):
                    break
            else:
                step = self._structure(out)
                if step is None:
                    break
                if step:
                    rest, self._pending = self._pending, ""
        return "".join(out), rest

    def end(self) -> str:
        rest = (self._word + self._pending).strip()
        self._word = self._pending = ""
        if not rest:
            return ""
        if self._quote:
            return quoted(rest)
        out: list[str] = []
        whole = not self._key and (rest in _CONSTANTS or rest in _CONSTANTS.values() or _NUMBER.fullmatch(rest))
        self._value(out, _constant(rest) if whole else '"' + quoted(rest))
        return "".join(out)

    @property
    def _named(self) -> bool:
        """True where the bracket that is open has keys."""
        return self._stack[-1] == "{" or (self._stack[-1] == "(" and len(self._stack) == 1 and self._keywords)

    def _structure(self, out: list[str]) -> bool | None:
        """Take the next character or word; True once the arguments are over, None where more text is needed."""
        pending = self._pending = self._pending.lstrip()
        if not pending:
            return None
        first = pending[0]
        if first in ":=" and (self._word or not self._key):
            self._pending = pending[1:]
            if self._word:
                self._value(out, as_json(self._word))
                self._word = ""
            out.append(": ")
            self._key = self._comma = False
            return False
        if self._word:
            self._say_word(out)
        if first in _CLOSES:
            if self._stack:
                self._number(out)
                self._value(out, "[" if first in "[(" else "{")
            else:
                out.append("[" if first == "[" else "{")
            self._stack.append(first)
            self._comma = False
            self._key = self._named
        elif first in "}])":
            opened = self._stack.pop()
            top = not self._stack
            out.append("}" if top and opened == "(" else _CLOSES[opened])
            self._pending = pending[1:]
            self._comma = False
            self._key = False
            return top
        elif first == ",":
            self._comma = True
            self._key = self._named
        else:
            return self._text(pending, out)
        self._pending = pending[1:]
        return False

    def _text(self, pending: str, out: list[str]) -> bool | None:
        """A quote opens, or a word comes."""
        if self._raw.startswith(pending) and len(pending) < len(self._raw):
            return None
        quote = next((mark for mark in self._quotes if pending.startswith(mark)), None)
        if quote is not None:
            self._number(out)
            self._value(out, '"')
            self._key = False
            self._quote, self._pending = quote, pending[len(quote) :]
            return False
        word = _WORD.match(pending)
        if word is None:  # a character that opens nothing
            self._pending = pending[1:]
            return False
        if word.end() == len(pending) and len(pending) < _WORD_CHARACTERS:
            return None
        self._pending = pending[word.end() :]
        if self._key:
            self._word = word[0]
        else:
            self._value(out, _constant(word[0]))
        return False

    def _say_word(self, out: list[str]) -> None:
        """A word in a key's place without a value behind it is a value without a key."""
        word, self._word = self._word, ""
        self._number(out)
        self._value(out, _constant(word))

    def _number(self, out: list[str]) -> None:
        """Name a value of a Python call that has no key by its place."""
        if self._key and self._stack and self._stack[-1] == "(":
            self._value(out, f'"{self._positional}"')
            out.append(": ")
            self._positional += 1
            self._key = self._comma = False

    def _value(self, out: list[str], text: str) -> None:
        out.append(", " + text if self._comma else text)
        self._comma = False

    def _string(self, out: list[str]) -> bool:
        """Pass on a text; False where more is needed."""
        pending = self._pending
        quote = self._quote
        if quote == self._raw:
            at = pending.find(quote)
            if at < 0:
                cut = len(pending) - partial_match_length(pending, (quote,))
                out.append(quoted(pending[:cut]))
                self._pending = pending[cut:]
                return False
            out.append(quoted(pending[:at]) + '"')
            self._pending, self._quote = pending[at + len(quote) :], ""
            return True
        stop = next((at for at, character in enumerate(pending) if character in (quote, "\\")), len(pending))
        out.append(quoted(pending[:stop]))
        self._pending = pending = pending[stop:]
        if not pending:
            return False
        if pending[0] == quote:
            out.append('"')
            self._pending = pending[1:]
            self._quote = ""
            return True
        return self._escape(out)

    def _escape(self, out: list[str]) -> bool:
        pending = self._pending
        if len(pending) < 2:
            return False
        size = _CODE_DIGITS.get(pending[1])
        if size is None:
            out.append(_ESCAPES.get(pending[1], "\\\\" + quoted(pending[1])))
            self._pending = pending[2:]
            return True
        if len(pending) < 2 + size and re.fullmatch(r"[0-9a-fA-F]*", pending[2:]):
            return False
        digits = pending[2 : 2 + size]
        if not re.fullmatch(r"[0-9a-fA-F]+", digits) or len(digits) < size or int(digits, 16) > 0x10FFFF:
            out.append("\\\\")
            self._pending = pending[1:]
            return True
        code = int(digits, 16)
        out.append(f"\\u{code:04x}" if code < 0x10000 else quoted(chr(code)))
        self._pending = pending[2 + size :]
        return True


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


def quoted(text: str) -> str:
    """A text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def literal(text: str) -> str:
    """A value of a parameter that is no text, as JSON."""
    value = text.strip()
    try:
        json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _CONSTANTS.get(value) or _python_literal(value) or json.dumps(text, ensure_ascii=False)
    return value


def _python_literal(value: str) -> str | None:
    """A list or a dictionary in Python's words as JSON; None for any other text."""
    if not value.startswith(("[", "{")):
        return None
    text, rest = RelaxedArguments().push(value)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return None
    return text if rest == "" else None


def _constant(word: str) -> str:
    """A bare word as JSON: a number, a constant, or its text."""
    if word in ("true", "false", "null") or _NUMBER.fullmatch(word):
        return word
    return _CONSTANTS.get(word) or as_json(word)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
