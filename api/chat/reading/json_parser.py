"""The common part of formats whose calls are JSON objects; they differ in the marks around one."""

from __future__ import annotations

from api.chat.piece import Piece
from api.chat.reading.calls import CallParser
from api.chat.reading.json_call import JsonCall


class JsonCallParser(CallParser):
    """Reads objects. A format says in `_open` where one begins, and in `_after` what to read once it is over."""

    def _read(self, call: JsonCall) -> None:
        """The held text goes on with this call."""
        self._call = call
        self._state = self._object

    def _object(self, piece: Piece) -> bool:
        rest = self._call.push(self._take(), piece)
        if rest is None:
            return False
        self._held = rest
        if not self._call.begun:
            return self._refuse(piece)
        self._called()
        self._state = self._after
        return True

    def _after(self, piece: Piece) -> bool:
        """Read what stands between a call and what follows it."""
        raise NotImplementedError

    def _give_up(self, piece: Piece) -> None:
        if self._state != self._object:
            return
        if self._call.begun:
            self._called()
        else:
            self._held = self._call.held
            self._refuse(piece)
