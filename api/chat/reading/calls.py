"""The calls of one choice: their numbers, their ids and the parts that an answer gets; and what reads one call."""

from __future__ import annotations

import hashlib
from typing import Protocol

from api.chat.piece import CallDelta, Piece
from api.chat.reading.form import Ids


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
