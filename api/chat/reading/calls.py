"""The common part of all formats of calls: text until a call opens, white space around calls, numbers of calls."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import ClassVar

from api.chat.piece import CallDelta, Piece
from api.schemas.view import Calling
from control.text.text import begun

State = Callable[[Piece], bool]
"""Takes what it can of the held text; True where another state, or the same, may go on with the rest."""


class Calls:
    """Numbers the calls of one choice. Their ids follow from the request, so a resumed stream has the same."""

    def __init__(self, rid: str, choice: int, single: bool) -> None:
        self._rid = rid
        self._choice = choice
        self._single = single
        self.count = 0

    def begin(self, piece: Piece, name: str) -> None:
        self.count += 1
        if self._kept:
            piece.add_call(CallDelta(self.count - 1, self._id(), name))

    def argue(self, piece: Piece, arguments: str) -> None:
        """The next part of the arguments of the call that began last."""
        if arguments and self._kept:
            piece.add_call(CallDelta(self.count - 1, self._id(), None, arguments))

    @property
    def _kept(self) -> bool:
        return self.count == 1 or not self._single

    def _id(self) -> str:
        origin = f"{self._rid}:{self._choice}:{self.count - 1}".encode()
        return f"call_{hashlib.sha256(origin).hexdigest()[:24]}"


class CallParser:
    """Tells calls from text. A format says in `triggers` what opens a call, and in `_open` what to read then.

    White space between text and a call, and between calls, belongs to the format: it is not said.
    """

    triggers: ClassVar[tuple[str, ...]] = ()

    def __init__(self, calling: Calling, calls: Calls) -> None:
        self._calling = calling
        self._calls = calls
        self._held = ""
        """Text about which nothing could be decided yet."""
        self._raw = ""
        """The text that opened the current call; it is part of the answer if there is no call after it."""
        self._blank = ""
        """White space after the text that was said; it is said too where more text follows."""
        self._after_call = False
        self._state: State = self._text

    def push(self, text: str, piece: Piece) -> None:
        self._held += text
        while self._state(piece):
            pass

    def mark(self, text: str, piece: Piece) -> None:
        """A special token of the format: it means what its text means, and is never said."""
        if self._state != self._text:
            self.push(text, piece)
        elif text in self.triggers:
            self._say(self._take(), piece)
            self._raw = ""
            self._open(text)

    def end(self, piece: Piece) -> None:
        """The answer is over: what can't become a call any more is text."""
        self._give_up(piece)
        self._say(self._take(), piece)
        if not self._after_call:
            piece.text += self._blank

    def _open(self, trigger: str) -> None:
        """A call has opened; set the state that reads it from the held text on."""
        raise NotImplementedError

    def _give_up(self, piece: Piece) -> None:
        """Say, or put back into the held text, what was read of a call that never began."""

    def _text(self, piece: Piece) -> bool:
        held = self._held
        places = [(at, trigger) for trigger in self.triggers if (at := held.find(trigger)) >= 0]
        if not places:
            cut = len(held) - begun(held, self.triggers)
            self._held = held[cut:]
            self._say(held[:cut], piece)
            return False
        at, trigger = min(places)
        self._say(held[:at], piece)
        self._held = held[at + len(trigger) :]
        self._raw = trigger
        self._open(trigger)
        return True

    def _take(self) -> str:
        held = self._held
        self._held = ""
        return held

    def _say(self, text: str, piece: Piece) -> None:
        text = self._blank + text
        if self._after_call:
            text = text.lstrip()
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            piece.text += said
            self._after_call = False

    def _called(self) -> None:
        """A call has come; the white space before it is no text."""
        self._blank = ""
        self._after_call = True

    def _refuse(self, piece: Piece) -> bool:
        """There was no call: its opening is text, and the rest is read as text, where another call may open."""
        self._say(self._raw, piece)
        self._raw = ""
        self._state = self._text
        return True
