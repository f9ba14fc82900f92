"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, one pair of tags per call."""

from __future__ import annotations

from api.chat.piece import Piece
from api.chat.reading.json_call import JsonCall
from api.chat.reading.json_parser import JsonCallParser

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(JsonCallParser):
    """Several objects in one pair of tags are several calls; a closing tag may be missing."""

    triggers = (OPEN,)

    def _open(self, trigger: str) -> None:
        self._read(JsonCall(self._calls))

    def _after(self, piece: Piece) -> bool:
        self._held = held = self._held.lstrip()
        if len(held) < len(CLOSE) and CLOSE.startswith(held):
            return False
        if held.startswith(CLOSE):
            self._held = held[len(CLOSE) :]
            self._state = self._text
        elif held.startswith("{"):
            self._raw = ""
            self._open(OPEN)
        else:
            self._state = self._text
        return True

    def _give_up(self, piece: Piece) -> None:
        super()._give_up(piece)
        if self._state == self._after:
            self._held = ""  # a closing tag that was cut short
