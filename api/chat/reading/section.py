"""Tells calls from text: text until a call opens, white space around calls, what stands between calls."""

from __future__ import annotations

import re
from collections.abc import Callable

from api.chat.piece import Piece
from api.chat.reading.calls import CallReader, Calls, HeadedCall, JsonCall, parts_of
from api.chat.reading.form import CallForm, CallShape
from api.schemas.view import Calling
from control.text.text_stream import partial_match_length

State = Callable[[Piece], bool]
"""A state takes what it can of the pending text and returns True where a state may go on with the rest."""

_BLANKS = 256
"""The most white space before a call."""
_SKIPPED = 256
"""The most characters that are passed over before a mark that closes."""
_BARE_LIST = re.compile(r"\[\s*[A-Za-z_]")


class Section:
    """The text of an answer, or of its reasoning, with the calls in it.

    White space between text and a call, and between calls, belongs to the form: it is no text.
    """

    def __init__(
        self,
        form: CallForm | None,
        calling: Calling | None,
        calls: Calls,
        *,
        drops: tuple[str, ...] = (),
        reopens: tuple[str, ...] = (),
        anywhere: bool = False,
        inside: bool = False,
    ) -> None:
        """`drops` are marks that are left out, `reopens` those that open reasoning: after a call, or `anywhere`.
        `inside`: the text is reasoning, in which only a known name makes a call."""
        self._form = form
        self._calling = calling
        self._calls = calls
        self._inside = inside
        self._drops = drops
        self._reopens = reopens
        self._anywhere = anywhere
        self._triggers = form.triggers if form is not None else ()
        self._marks = (*self._triggers, *drops, *reopens)
        self._first = frozenset(mark[0] for mark in self._marks)
        self._names = calling.names if calling is not None else []
        self._pending = ""
        """Text about which nothing could be decided yet."""
        self._raw = ""
        """The text that opened the current call; it is part of the answer if there is no call after it."""
        self._blanks: list[str] = []
        """White space after the text that was returned; it is text where more follows."""
        self._after_call = False
        self._tokens = set[str]()
        """Marks that came as tokens: they are never text."""
        self._token = ""
        """The mark that is read now, where it came as a token."""
        self.reopened = ""
        """The mark with which reasoning has opened: `take` has the text of it."""
        self._reader: CallReader | None = None
        self._attempt = 0
        self._prefix = ""
        self._start_mark = ""
        """The mark that is a part of the call that may begin."""
        bare = form is not None and form.shape.bare and not inside
        fresh = calling is None or not calling.continued or bool(calling.begun)
        self._state: State = self._start if bare and fresh else self._text

    def push(self, text: str, piece: Piece) -> None:
        self._pending += text
        while self._state(piece):
            pass

    def mark(self, text: str, piece: Piece) -> None:
        """A special token of the form: it means what its text means, and is never text."""
        if self._state == self._start:
            self._state = self._text
        together = self._pending + text
        meant = partial_match_length(together, self._marks) or any(mark in together for mark in self._marks)
        if self._state == self._text and not meant:
            self._say(self._take(), piece)
            return
        self._tokens.add(text)
        self._token = text
        self.push(text, piece)
        self._token = ""

    def end(self, piece: Piece) -> None:
        """The answer is over: what can't become a call any more is text."""
        if self._state == self._call:
            assert self._reader is not None
            if self._reader.begun:
                self._reader.end(piece)
                self._called()
                self._pending = ""
            else:
                self._pending = self._prefix + self._reader.consumed + self._pending
                self._refuse(piece)
        elif self._state == self._opened:
            self._refuse(piece)
        elif self._state == self._after:
            self._pending = ""  # a mark that was cut short
        self._say(self._take(), piece)
        if not self._after_call:
            self._emit("".join(self._blanks), piece)

    def take(self) -> str:
        """The text behind the mark that opened reasoning."""
        self.reopened = ""
        return self._take()

    def _start(self, piece: Piece) -> bool:
        """Only the answer's first character, or what follows a call, can open a call without a mark."""
        start = self._pending.lstrip()
        late = len(self._pending) - len(start) > _BLANKS
        if not late and start in ("", "["):
            return False
        self._state = self._text
        if not late and (start.startswith("{") or _BARE_LIST.match(start)):
            self._begin("")
        return True

    def _text(self, piece: Piece) -> bool:
        pending = self._pending
        if self._first.isdisjoint(pending):
            self._pending = ""
            self._say(pending, piece)
            return False
        places = [(at, -len(mark), mark) for mark in self._marks if (at := self._find(pending, mark)) >= 0]
        cut = len(pending) - partial_match_length(pending, self._marks)
        if not places or min(places)[0] > cut:
            self._pending = pending[cut:]
            self._say(pending[:cut], piece)
            return False
        at, _, mark = min(places)
        if any(other.startswith(pending[at:]) and len(other) > len(pending) - at for other in self._marks):
            self._pending = pending[at:]  # it may become a longer mark
            self._say(pending[:at], piece)
            return False
        self._say(pending[:at], piece)
        self._pending = pending[at + len(mark) :]
        self._met(mark)
        return not self.reopened

    def _find(self, pending: str, mark: str) -> int:
        at = pending.find(mark)
        if mark not in self._reopens or self._anywhere or at < 0:
            return at
        return at if self._after_call and not pending[:at].strip() else -1

    def _met(self, mark: str) -> None:
        """A mark stands before the pending text."""
        self._state = self._text
        if mark in self._reopens:
            self._blanks = []
            self._after_call = True
            self.reopened = mark
        elif mark in self._drops:
            self._blanks = []
            self._after_call = True
        else:
            self._begin(mark)

    def _begin(self, mark: str) -> None:
        """A call may begin with the pending text, or with a mark that is a part of it."""
        assert self._form is not None
        self._start_mark = ""
        if mark and mark not in (opened.strip() for opened in self._form.open):
            self._pending = mark + self._pending
            self._start_mark, mark = mark, ""
        self._raw = mark
        self._attempt = 0
        self._prefix = ""
        self._state = self._opened

    @property
    def _shape(self) -> CallShape:
        assert self._form is not None
        return self._form.shapes[self._attempt]

    def _opened(self, piece: Piece) -> bool:
        """Read a list's bracket, then a call."""
        shape = self._shape
        start = self._pending.lstrip()
        if len(self._pending) - len(start) > _BLANKS:
            self._pending = self._prefix + self._pending
            return self._refuse(piece)
        if not start:
            return False
        if start.startswith("[") and (shape.listed or shape.kind == "python") and not self._prefix:
            self._prefix = self._pending[: len(self._pending) - len(start) + 1]
            self._pending = start[1:]
            return True
        self._read()
        return True

    def _read(self) -> None:
        """The pending text goes on with a call."""
        assert self._form is not None
        shape = self._shape
        literal = self._calling.literal if self._calling is not None else {}
        named_only = self._inside or shape.known or (shape.bare and not self._raw.strip(" ;"))
        names = self._names if named_only else None
        if shape.kind == "object":
            self._reader = JsonCall(self._calls, names, keyed=shape.keyed)
        else:
            self._reader = HeadedCall(shape, self._calls, literal, self._form.close, names)
        self._state = self._call

    def _call(self, piece: Piece) -> bool:
        assert self._reader is not None and self._form is not None
        rest = self._reader.push(self._take(), piece)
        if rest is None:
            return False
        if self._token.endswith(rest) and rest != self._token:
            rest = ""  # the call has ended within a token
        self._pending = rest
        if self._reader.begun:
            self._called()
            self._prefix = ""
            self._start_mark = ""
            self._state = self._after
        else:
            self._pending = self._prefix + rest
            self._attempt, self._prefix = self._attempt + 1, ""
            if self._attempt < len(self._form.shapes):
                self._state = self._opened
            else:
                self._attempt = 0
                if self._start_mark:
                    self._raw, self._pending = self._start_mark, self._pending.removeprefix(self._start_mark)
                return self._refuse(piece)
        return True

    def _after(self, piece: Piece) -> bool:
        """Between a call and what follows it: a mark that closes, a separator, or the next call."""
        assert self._form is not None
        shape = self._shape
        self._pending = pending = self._pending.lstrip()
        closes = [text for close in self._form.close if (text := close.strip())]
        separator = shape.between.strip()
        listed = ["]"] if shape.listed or shape.kind == "python" else []
        marks = [*closes, *listed, *([separator] if separator else [])]
        if not pending or any(len(pending) < len(text) and text.startswith(pending) for text in marks):
            return False
        if shape.skips and closes and len(pending) < _SKIPPED:
            places = [pending.find(text) for text in closes if text in pending]
            if not places:
                return False
            self._pending = pending = pending[min(places) :]
        close = next((text for text in closes if pending.startswith(text)), None)
        if close is not None:
            self._pending, self._state = pending[len(close) :], self._text
        elif listed and pending.startswith("]"):
            self._pending = pending[1:]
        elif separator and pending.startswith(separator):
            if not pending[len(separator) :].strip() and len(pending) <= _BLANKS:
                return False
            self._raw = separator
            self._pending = pending[len(separator) :]
            self._read()
        elif (first := _first_of(shape)) and (closes or shape.bare) and pending.startswith(first):
            self._raw = ""
            self._read()
        elif first and closes and len(pending) < len(first) and first.startswith(pending):
            return False
        elif shape.kind == "python" and closes and re.match(r"[A-Za-z_]", pending):
            self._raw = ""
            self._read()
        else:
            self._state = self._text
        return True

    def _take(self) -> str:
        pending, self._pending = self._pending, ""
        return pending

    def _say(self, text: str, piece: Piece) -> None:
        for mark in self._tokens:
            text = text.replace(mark, "")
        if not text:
            return
        if self._after_call:
            text = text.lstrip()
        words = text.rstrip()
        if words:
            self._emit("".join([*self._blanks, words]), piece)
            self._blanks = []
            self._after_call = False
        if blank := text[len(words) :]:
            self._blanks.append(blank)

    def _emit(self, text: str, piece: Piece) -> None:
        if self._inside:
            piece.reasoning += text
        else:
            piece.text += text

    def _called(self) -> None:
        """A call has come; the white space before it is no text."""
        self._blanks = []
        self._after_call = True

    def _refuse(self, piece: Piece) -> bool:
        """There was no call: its opening is text, and the rest is read as text, where another call may open."""
        self._say(self._raw, piece)
        self._raw = ""
        self._state = self._text
        return True


def _first_of(shape: CallShape) -> str:
    """The mark with which the head of a call begins, if it begins with one."""
    if shape.kind == "object":
        return "{"
    parts = parts_of(shape.head)
    return parts[0][0] if parts else ""
