"""The parsers of one choice in a row: reasoning first, then calls in what follows it."""

from __future__ import annotations

from api.chat.piece import Piece
from api.chat.reading.calls import CallParser, Calls
from api.chat.reading.hermes import HermesParser
from api.chat.reading.llama3 import Llama3Parser
from api.chat.reading.qwen_xml import QwenXmlParser
from api.chat.reading.thinking import ThinkingParser
from api.schemas.view import CallFormat, Reading

_FORMATS: dict[CallFormat, type[CallParser]] = {
    "hermes": HermesParser,
    "qwen_xml": QwenXmlParser,
    "llama3": Llama3Parser,
}


class AnswerParser:
    """Reads one choice's text into pieces."""

    def __init__(self, reading: Reading, rid: str, choice: int) -> None:
        self._reasoning = ThinkingParser(reading.thinking) if reading.thinking is not None else None
        self._hidden = reading.thinking is not None and reading.thinking.hidden
        calling = reading.calling
        self._calls = Calls(rid, choice, calling is not None and calling.single)
        self._tools = _FORMATS[calling.format](calling, self._calls) if calling is not None else None
        self._begun = calling.begun if calling is not None else ""

    @property
    def thinking(self) -> bool | None:
        """True if the next token belongs to the reasoning; None while that is unknown."""
        return self._reasoning.thinking if self._reasoning is not None else False

    @property
    def called(self) -> bool:
        """True once a call has come."""
        return self._calls.count > 0

    def push(self, text: str, piece: Piece) -> None:
        text = self._begun + text
        self._begun = ""
        if self._reasoning is not None:
            reasoning, text = self._reasoning.push(text)
            piece.reasoning += "" if self._hidden else reasoning
        self._content(text, piece)

    def mark(self, text: str, piece: Piece) -> None:
        """A special token that is never shown: it opens or closes what its text says."""
        if self._reasoning is not None and self._reasoning.takes(text):
            self.push(text, piece)
        elif self._tools is not None and not self.thinking:
            self._tools.mark(text, piece)

    def end(self, piece: Piece) -> None:
        if self._reasoning is not None:
            reasoning, text = self._reasoning.end()
            piece.reasoning += "" if self._hidden else reasoning
            self._content(text, piece)
        if self._tools is not None:
            self._tools.end(piece)

    def _content(self, text: str, piece: Piece) -> None:
        if not text:
            return
        if self._tools is None:
            piece.text += text
        else:
            self._tools.push(text, piece)
