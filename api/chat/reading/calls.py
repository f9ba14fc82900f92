"""The calls of one choice, with their numbers and ids, and the readers of a call: of a JSON object, and of a call whose
name stands before its arguments.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Literal, Protocol, cast

from api.chat.piece import CallDelta, Piece
from api.chat.reading.arguments import Arguments, Brackets, JsonArguments, Parameters, RelaxedArguments, as_json
from api.chat.reading.form import WORD, WORD_CHARACTERS, CallShape, Ids


class Calls:
    """Numbers the calls of one choice. Their ids follow from the request, so a resumed stream has the same."""

    def __init__(self, rid: str, choice: int, single: bool, ids: Ids = "any") -> None:
        self._rid = rid
        self._choice = choice
        self._single = single
        self._ids: Ids = ids
        self._name = ""
        self.count = 0

    def begin(self, piece: Piece, name: str) -> None:
        self.count += 1
        self._name = name = name.encode(errors="replace").decode()
        if self._counts:
            piece.add_call(CallDelta(self.count - 1, self._id(), name))

    def argue(self, piece: Piece, arguments: str) -> None:
        """The next part of the arguments of the call that began last."""
        if arguments and self._counts:
            piece.add_call(CallDelta(self.count - 1, self._id(), None, arguments))

    @property
    def _counts(self) -> bool:
        return self.count == 1 or not self._single

    def _id(self) -> str:
        return call_id(self._ids, f"{self._rid}:{self._choice}:{self.count - 1}", self._name, self.count - 1)


def call_id(ids: Ids, origin: str, name: str, index: int) -> str:
    """The id of a call, in the form that the model's template demands; `origin` tells it from all others."""
    if ids == "numbered":
        return f"functions.{name}:{index}"
    digest = hashlib.sha256(origin.encode()).hexdigest()
    return digest[:9] if ids == "nine" else f"call_{digest[:24]}"


class CallReader(Protocol):
    """Reads one call from the text in which it stands."""

    begun: bool
    """True once a call has begun."""

    @property
    def consumed(self) -> str:
        """The text that was read without effect so far."""
        ...

    def push(self, text: str, piece: Piece) -> str | None:
        """The text after the call once it is over; if then nothing has `begun`, that is all text. None before."""
        ...

    def end(self, piece: Piece) -> None:
        """The answer is over: a call that has begun ends with the arguments that there are."""
        ...


_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)*"(?:name|tool_name)"\s*:\s*'
    r'"(?P<name>(?:[^"\\]|\\.)+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""The usual beginning, after which the arguments can be passed on as they come."""
_KEYED_HEAD = re.compile(r'\s*\{\s*"(?P<name>(?:[^"\\]|\\.)+)"\s*:\s*(?=\{)')
_FIRST_KEY = re.compile(r'\s*\{\s*"([^"\\]*)"')
_NO_OBJECT = re.compile(r'\s*(?:[^\s{]|\{\s*[^\s"])')
_KEYS = ("name", "tool_name", "arguments", "parameters", "type", "id", "tool_call_id")
_OBJECT_HEAD_CHARACTERS = 1024
"""The longest beginning of a call that is read as it comes; a call with a longer one is read as a whole at its end."""
_BLANKS = 256
"""The most white space before another member."""


class JsonCall:
    """Reads a call that is a JSON object, `{"name": …, "arguments": {…}}`, while it comes."""

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
        if len(self._start) < _OBJECT_HEAD_CHARACTERS:
            self._start = (self._start + text)[:_OBJECT_HEAD_CHARACTERS]
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
            return self._over() if self._keyed and len(self._start) == _OBJECT_HEAD_CHARACTERS else None
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


def _value(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


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
    """Reads a call whose name stands before its arguments, in the marks of a shape.

    `names` are the functions that may be called, None for any.
    """

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
