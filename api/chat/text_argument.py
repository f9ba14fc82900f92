"""The value of a call's only text argument, read from its JSON text while that comes."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, cast

_HEAD_CHARACTERS = 256
"""The number of characters after which arguments whose value has not begun have another form."""
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"


class TextArgument:
    """Reads `{"<name>": "…"}`. Arguments in another form are the value themselves, as they were written."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._head = re.compile(rf'\s*\{{\s*"{re.escape(name)}"\s*:\s*"')
        self._state: Literal["head", "text", "over"] = "head"
        self._raw: list[str] = []
        self._pending = ""
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The value as far as it has come."""
        return "".join(self._texts)

    def push(self, text: str) -> str:
        """The part of the value that `text` adds."""
        self._raw.append(text)
        if self._state == "over" or (self._state == "head" and len(self._pending) > _HEAD_CHARACTERS):
            return ""
        self._pending += text
        if self._state == "head":
            head = self._head.match(self._pending)
            if head is None:
                return ""
            self._pending = self._pending[head.end() :]
            self._state = "text"
        part = self._decode()
        self._texts.append(part)
        return part

    def end(self) -> str:
        """The rest of the value: all of it where the arguments have another form."""
        rest = self._other_form() if self._state == "head" else ""
        self._texts.append(rest)
        self._state = "over"
        return rest

    def _other_form(self) -> str:
        raw = "".join(self._raw)
        try:
            parsed: Any = json.loads(raw, strict=False)
        except (ValueError, RecursionError):
            return raw
        value = cast("dict[str, Any]", parsed).get(self._name) if isinstance(parsed, dict) else None
        return value if isinstance(value, str) else "" if parsed == {} else raw

    def _decode(self) -> str:
        """Decode the pending text up to the closing quote, or up to an escape that is cut short."""
        parts: list[str] = []
        at = 0
        pending = self._pending
        while True:
            plain = _PLAIN.match(pending, at)
            assert plain is not None
            parts.append(plain[0])
            at = plain.end()
            if at == len(pending):
                break
            if pending[at] == '"':
                self._state = "over"
                break
            decoded, length = _escape(pending, at)
            if not length:
                break
            parts.append(decoded)
            at += length
        self._pending = pending[at:]
        return "".join(parts)


def _escape(text: str, at: int) -> tuple[str, int]:
    """The character of the escape at `at`, and how long the escape is: 0 where its end has not come yet."""
    kind = text[at + 1 : at + 2]
    if kind != "u":
        return (_ESCAPES.get(kind, kind), 2) if kind else ("", 0)
    first = _unit(text, at)
    if first is None:
        return ("", 0) if len(text) < at + 6 else (_UNKNOWN, 2)
    if not 0xD800 <= first < 0xE000:
        return chr(first), 6
    if first >= 0xDC00:
        return _UNKNOWN, 6
    following = text[at + 6 : at + 12]
    if len(following) < 6 and (following[:2] == "\\u"[: len(following[:2])]):
        return "", 0
    second = _unit(text, at + 6)
    if second is None or not 0xDC00 <= second < 0xE000:
        return _UNKNOWN, 6
    return chr(0x10000 + ((first - 0xD800) << 10) + second - 0xDC00), 12


def _unit(text: str, at: int) -> int | None:
    """The UTF-16 unit of a whole `\\uXXXX` at `at`."""
    match = re.match(r"\\u([0-9a-fA-F]{4})", text[at : at + 6])
    return int(match[1], 16) if match is not None else None
