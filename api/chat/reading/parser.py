"""Splits one choice's text into pieces: reasoning first, then calls in what follows it, as the model's form says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from api.chat.piece import Piece
from api.chat.reading.calls import Calls
from api.chat.reading.channels import ChannelReader
from api.chat.reading.form import Form, Pair
from api.chat.reading.response_template import form_of
from api.chat.reading.section import Section
from api.chat.reading.table import TABLE
from api.chat.reading.thinking import ThinkingParser
from api.schemas.view import OWN, Reading, ThinkingMarks

_NONE = Form("")


def form_read(reading: Reading) -> Form:
    """The form in which an answer is to be read."""
    name = reading.calling.format if reading.calling is not None else reading.form
    if name == OWN and reading.own is not None:
        return form_of(OWN, reading.own)
    return TABLE.get(name, _NONE)


class AnswerParser:
    """Reads one choice's text into pieces."""

    def __init__(self, reading: Reading, rid: str, choice: int) -> None:
        form = form_read(reading)
        calling = reading.calling
        thinking = reading.thinking
        self._hidden = thinking is not None and thinking.hidden
        self._calls = Calls(rid, choice, calling is not None and calling.single, form.ids)
        self._pairs = [pair for pair in form.reasoning if pair.anywhere]
        if thinking is not None and not any(pair.open == thinking.open for pair in self._pairs):
            self._pairs.append(Pair(thinking.open, thinking.close))
        self._over = False
        self._begun = calling.begun if calling is not None and calling.begun else reading.prompted
        self._channels: ChannelReader | None = None
        self._reasoning: ThinkingParser | None = None
        self._section: Section | None = None
        self._nesting: Callable[[], Section] | None = None
        """Makes the section that reads calls inside of reasoning."""
        self._nested: Section | None = None
        if form.channels is not None:
            inside = thinking is not None and thinking.begun
            hidden = reading.hidden or self._hidden
            self._channels = ChannelReader(form.channels, self._calls, thinking=inside, hidden=hidden)
            return
        if thinking is not None:
            self._reasoning = ThinkingParser(thinking)
        calls = form.calls if calling is not None else None
        anywhere = any(pair.anywhere for pair in self._pairs)
        if calls is not None or form.content or anywhere:
            opens = tuple(pair.open.strip() for pair in self._pairs)
            self._section = Section(
                calls, calling, self._calls, drops=tuple(form.content), reopens=opens, anywhere=anywhere
            )
        if calls is not None and calling is not None and calling.names and self._pairs:
            self._nesting = partial(Section, calls, calling, self._calls, inside=True)

    @property
    def thinking(self) -> bool | None:
        """True if the next token belongs to the reasoning; None while that is unknown."""
        if self._channels is not None:
            return self._channels.thinking
        return self._reasoning.thinking if self._reasoning is not None else False

    @property
    def called(self) -> bool:
        """True once a call has come."""
        return self._calls.count > 0

    def push(self, text: str, piece: Piece) -> None:
        text, self._begun = self._begun + text, ""
        if self._channels is not None:
            self._channels.push(text, piece)
            return
        while True:
            if self._reasoning is not None:
                reasoning, text = self._reasoning.push(text)
                self._reason(reasoning, piece)
            self._content(text, piece)
            if self._section is None or not self._section.reopened:
                return
            text = self._reopen(self._section)

    def mark(self, text: str, piece: Piece) -> None:
        """A special token that is never shown: it opens or closes what its text says."""
        if self._channels is not None:
            self._channels.mark(text, piece)
        elif self._reasoning is not None and self._reasoning.takes(text):
            self.push(text, piece)
        elif self.thinking:
            if self._nesting is not None:
                self._nested = self._nested or self._nesting()
                self._nested.mark(text, piece)
        elif self._section is not None:
            self._section.mark(text, piece)
            if self._section.reopened:
                self.push(self._reopen(self._section), piece)

    def end(self, piece: Piece) -> None:
        if self._channels is not None:
            self._channels.end(piece)
            return
        self._over = True
        if self._reasoning is not None:
            reasoning, text = self._reasoning.end()
            self._reason(reasoning, piece)
            self._content(text, piece)
        if self._section is not None:
            self._section.end(piece)

    def _reopen(self, section: Section) -> str:
        """Reasoning has begun once more: the text of it."""
        pair = next(pair for pair in self._pairs if pair.open.strip() == section.reopened)
        thinking = ThinkingMarks(pair.open, pair.close)
        if self._reasoning is None:
            self._reasoning = ThinkingParser(thinking)
        self._reasoning.reopen(thinking)
        return section.take()

    def _reason(self, reasoning: str, piece: Piece) -> None:
        """Add a part of the reasoning, and the calls in it, to the piece; after the last part it is over."""
        if self._nesting is None:
            piece.reasoning += "" if self._hidden else reasoning
            return
        if reasoning:
            self._nested = self._nested or self._nesting()
            self._nested.push(reasoning, piece)
        if self._nested is not None and (self._over or not self.thinking):
            self._nested.end(piece)
            self._nested = None
        if self._hidden:
            piece.reasoning = ""

    def _content(self, text: str, piece: Piece) -> None:
        if not text:
            return
        if self._section is None:
            piece.text += text
        else:
            self._section.push(text, piece)
