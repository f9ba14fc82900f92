"""One call whose name stands before its arguments, in the marks of a shape."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from api.chat.piece import Piece
from api.chat.reading.arguments import Arguments, JsonArguments, Parameters, RelaxedArguments
from api.chat.reading.calls import Calls
from api.chat.reading.form import WORD, WORD_CHARACTERS, CallShape

_NAME = r"[A-Za-z0-9_.:/-]"
_WORDS = re.compile(WORD + "+")
_HOLE = re.compile(r"\{(name|id|index)\}")
_GROUPS = {"name": "(?P<name>.+?)", "id": "(?P<id>.+?)", "index": r"(?P<index>\d+)"}
_HEAD_CHARACTERS = 2048

Part = tuple[str, re.Pattern[str] | None]
"""A text that is expected, or with a pattern a word."""


def parts_of(text: str) -> list[Part]:
    """The parts that are expected for `text` of a shape: texts without white space, and words with holes."""
    parts: list[Part] = []
    for chunk in text.split():
        at = 0
        while at < len(chunk):
            hole = _HOLE.search(chunk, at)
            if hole is None:
                parts.append((chunk[at:], None))
                break
            start = hole.start()
            while start > at and re.fullmatch(_NAME, chunk[start - 1]):
                start -= 1
            if start > at:
                parts.append((chunk[at:start], None))
            end = hole.end()
            pattern = re.escape(chunk[start : hole.start()]) + _GROUPS[hole[1]]
            while end < len(chunk) and (re.fullmatch(_NAME, chunk[end]) or _HOLE.match(chunk, end)):
                following = _HOLE.match(chunk, end)
                pattern += _GROUPS[following[1]] if following else re.escape(chunk[end])
                end = following.end() if following else end + 1
            parts.append(("", re.compile(pattern)))
            at = end
    return parts


class HeadedCall:
    """Reads one call; `names` are the functions that may be called, None for any."""

    def __init__(
        self,
        shape: CallShape,
        calls: Calls,
        literal: Mapping[str, Collection[str]],
        ends: Collection[str],
        names: Collection[str] | None = None,
    ) -> None:
        """`literal`: each function's parameters that are no text. `ends`: the marks that may follow the call."""
        self._shape = shape
        self._calls = calls
        self._names = names
        self._literal = literal
        self._ends = [end for end in ends if end]
        self._head, self._tail = _parts(shape)
        self._optional = parts_of(shape.optional)
        self._at = 0
        self._name = ""
        self._pending = ""
        self._read = ""
        self._arguments: Arguments | None = None
        self._argued = False
        """True once the arguments are over."""
        self.begun = False

    @property
    def consumed(self) -> str:
        return self._read + self._pending

    def push(self, text: str, piece: Piece) -> str | None:
        if self._arguments is None:
            self._pending += text
            begins = self._read_head()
            if begins is None and len(self.consumed) < _HEAD_CHARACTERS:
                return None
            if not begins:
                rest = self.consumed
                self._read = ""
                self._pending = ""
                return rest
            self._begin(piece)
            text, self._pending = self._pending, ""
        assert self._arguments is not None
        if not self._argued:
            part, rest = self._arguments.push(text)
            self._calls.argue(piece, part)
            if rest is None:
                return None
            self._argued = True
            text = rest
        return self._finish(text)

    def end(self, piece: Piece) -> None:
        if self._arguments is not None and not self._argued:
            self._calls.argue(piece, self._arguments.end())

    def _read_head(self) -> bool | None:
        """True once the arguments begin; False where there is no call, None while that is unknown."""
        while self._at < len(self._head):
            text, word = self._head[self._at]
            done = self._take_text(text) if word is None else self._take_word(word)
            if not done:
                if done is False and self._optional and text == self._optional[0][0]:
                    self._at += len(self._optional)
                    continue
                return done
            self._at += 1
        if self._names is not None and self._name not in self._names:
            return False
        return self._arguments_follow()

    def _take_text(self, text: str) -> bool | None:
        start = self._pending.lstrip()
        if start.startswith(text):
            self._skip(len(self._pending) - len(start) + len(text))
            return True
        if not text.startswith(start):
            return False
        return None

    def _take_word(self, pattern: re.Pattern[str]) -> bool | None:
        start = self._pending.lstrip()
        word = _WORDS.match(start)
        if word is None:
            return None if not start else False
        if word.end() == len(start) and word.end() <= WORD_CHARACTERS:
            return None
        groups = pattern.fullmatch(word[0]) if word.end() <= WORD_CHARACTERS else None
        if groups is None:
            return False
        self._name = groups.groupdict().get("name") or self._name
        self._skip(len(self._pending) - len(start) + word.end())
        return True

    def _skip(self, count: int) -> None:
        self._read += self._pending[:count]
        self._pending = self._pending[count:]

    def _arguments_follow(self) -> bool | None:
        start = self._pending.lstrip()
        if self._shape.kind == "parameters":
            if self._head and self._head[-1][1] is None:
                return len(self._read) <= _HEAD_CHARACTERS
            expected = [Parameters(self._shape, frozenset()).first, *self._ends]
            expected += [text for text, _ in self._tail[:1]]
        else:
            expected = ["("] if self._shape.kind == "python" else ["{"]
        first = next((text for text in expected if start.startswith(text)), None)
        if first is not None:
            if len(self.consumed) - len(start) + len(first) > _HEAD_CHARACTERS:
                return False
            self._pending = start
            return True
        return None if any(text.startswith(start) for text in expected) else False

    def _begin(self, piece: Piece) -> None:
        self.begun = True
        self._read = ""
        self._calls.begin(piece, self._name)
        match self._shape.kind:
            case "parameters":
                self._arguments = Parameters(self._shape, frozenset(self._literal.get(self._name, ())))
            case "relaxed":
                self._arguments = RelaxedArguments(self._shape.quote)
            case "python":
                self._arguments = RelaxedArguments(keywords=True)
            case _:
                self._arguments = JsonArguments()

    def _finish(self, text: str) -> str | None:
        """The rest after the marks that end the call; a mark may be missing."""
        self._pending += text
        while self._tail:
            done = self._take_text(self._tail[0][0])
            if done is None:
                self._pending = self._pending.lstrip()
                return None
            if not done:
                break
            del self._tail[0]
        rest, self._pending = self._pending, ""
        return rest


def _parts(shape: CallShape) -> tuple[list[Part], list[Part]]:
    if shape.kind == "python":
        return [("", re.compile(r"(?P<name>.+?)(?:\.call)?"))], []
    return parts_of(shape.head), parts_of(shape.tail)
