"""Llama 3: an answer that is `{"name": …, "parameters": {…}}`, or such an object after `<|python_tag|>`.

Several calls are separated by `;`. A bare object is a call only where it names one of the request's tools: else it is
an answer in JSON.
"""

from __future__ import annotations

from api.chat.piece import Piece
from api.chat.reading.calls import Calls
from api.chat.reading.json_call import JsonCall
from api.chat.reading.json_parser import JsonCallParser
from api.schemas.view import Calling

PYTHON_TAG = "<|python_tag|>"


class Llama3Parser(JsonCallParser):
    triggers = (PYTHON_TAG,)

    def __init__(self, calling: Calling, calls: Calls) -> None:
        super().__init__(calling, calls)
        self._state = self._text if calling.continued and not calling.begun else self._start

    def mark(self, text: str, piece: Piece) -> None:
        if self._state == self._start:
            self._state = self._text
        super().mark(text, piece)

    def _start(self, piece: Piece) -> bool:
        """Only the answer's first character, or what follows a call, can open a bare object."""
        start = self._held.lstrip()
        if not start:
            return False
        self._state = self._text
        if start.startswith("{"):
            self._raw = ""
            self._read(JsonCall(self._calls, self._calling.names))
        return True

    def _open(self, trigger: str) -> None:
        self._read(JsonCall(self._calls))

    def _after(self, piece: Piece) -> bool:
        held = self._held.lstrip()
        if not held:
            return False
        if held[0] != ";":
            self._state = self._text
            return True
        if not held[1:].strip():
            return False
        if held[1:].lstrip().startswith("{"):
            self._held = held[1:]
            self._raw = ";"
            self._read(JsonCall(self._calls, self._calling.names))
        else:
            self._state = self._text
        return True
