"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one pair of tags per call."""

from __future__ import annotations

from api.chat.piece import Piece
from api.chat.reading.calls import CallParser
from api.chat.reading.json_call import JsonCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(CallParser):
    """Several objects in one pair of tags are several calls; a closing tag may be missing."""

    triggers = (OPEN,)

    def _open(self, trigger: str) -> None:
        self._call = JsonCall(self._calls)
        self._state = self._object

    def _object(self, piece: Piece) -> bool:
        rest = self._call.push(self._take(), piece)
        if rest is None:
            return False
        self._held = rest
        if not self._call.begun:
            return self._refuse(piece)
        self._called()
        self._state = self._close
        return True

    def _close(self, piece: Piece) -> bool:
        self._held = held = self._held.lstrip()
        if len(held) < len(CLOSE) and CLOSE.startswith(held):
            return False
        if held.startswith(CLOSE):
            self._held, self._state = held[len(CLOSE) :], self._text
        elif held.startswith("{"):
            self._raw = ""
            self._open(OPEN)
        else:
            self._state = self._text
        return True

    def _give_up(self, piece: Piece) -> None:
        if self._state == self._object:
            if self._call.begun:
                self._called()
            else:
                self._held = self._call.held
                self._refuse(piece)
        elif self._state == self._close:
            self._held = ""  # a closing tag that was cut short
