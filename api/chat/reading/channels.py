"""Answers whose texts have headers, as in OpenAI's harmony: `<|channel|>analysis<|message|>…<|end|>`.

The header says what a text is: reasoning, content, or the arguments of a call where it names a recipient.
"""

from __future__ import annotations

import re
from typing import Literal

from api.chat.piece import Piece
from api.chat.reading.calls import Calls
from api.chat.reading.form import Channels
from control.text.text_stream import partial_match_length

_HEADER_CHARACTERS = 512


class ChannelReader:
    """Reads the texts of one choice. Text without a header is content."""

    def __init__(self, channels: Channels, calls: Calls, *, thinking: bool = False, hidden: bool = False) -> None:
        """`thinking`: the prompt ends inside reasoning. `hidden`: reasoning is not shown."""
        self._channels = channels
        self._calls = calls
        self._hidden = hidden
        self._marks = (*channels.opens, channels.message, *channels.closes)
        recipient = re.escape(channels.recipient)
        self._recipient = re.compile(rf"{recipient}(?:functions\.)?([^\s<]+)")
        self._first = re.compile(rf"\s*{recipient}")
        self._kind: Literal["header", "reasoning", "content", "call", "none"] = "reasoning" if thinking else "none"
        self._header = ""
        self._pending = ""
        self._blanks: list[str] = []
        """White space after the text that was returned."""
        self._fresh = True
        """True until the text that is open has a character that is no white space."""
        self._bare = False
        """True once there is text behind the last mark without a header: no header begins in it by itself."""
        self._kinds_before = set[str]()
        """The kinds of text that the answer had before."""

    @property
    def thinking(self) -> bool | None:
        """True if the next token belongs to the reasoning; None while that is unknown."""
        if self._kind == "header" or (self._kind == "none" and not self._pending):
            return None
        return self._kind == "reasoning"

    def push(self, text: str, piece: Piece) -> None:
        self._pending += text
        while True:
            pending = self._pending
            if self._kind == "none" and not self._header and self._begins_with_recipient(pending):
                self._kind = "header"
            places = [(at, mark) for mark in self._marks if (at := pending.find(mark)) >= 0]
            if not places:
                cut = len(pending) - partial_match_length(pending, self._marks)
                if (
                    self._kind == "none"
                    and not self._bare
                    and self._channels.recipient.startswith(pending.strip()[:3] or "\0")
                ):
                    cut = 0
                self._pending = pending[cut:]
                self._say(pending[:cut], piece)
                return
            at, mark = min(places)
            self._say(pending[:at], piece)
            self._pending = pending[at + len(mark) :]
            self._met(mark, piece)

    def mark(self, text: str, piece: Piece) -> None:
        """A control token."""
        if text in self._marks:
            self.push(text, piece)
        elif self._kind == "header":
            self._header += " "

    def end(self, piece: Piece) -> None:
        """The answer is over."""
        pending, self._pending = self._pending, ""
        self._say(pending, piece)
        if self._kind in ("content", "none"):
            piece.text += "".join(self._blanks)
        self._blanks = []

    def _begins_with_recipient(self, pending: str) -> bool:
        return not self._bare and self._first.match(pending) is not None

    def _met(self, mark: str, piece: Piece) -> None:
        if mark == self._channels.message:
            self._open(piece)
        elif mark in self._channels.closes:
            self._close()
        elif self._kind != "header":
            self._close()
            self._kind = "header"
            self._header = ""
            self._header += f" {mark} "
        else:
            self._header += f" {mark} "

    def _open(self, piece: Piece) -> None:
        """The header is over: its text follows."""
        header, self._header = self._header, ""
        self._blanks = []
        self._fresh = True
        recipient = self._recipient.search(header)
        if self._kind != "header":
            self._kind = "content"
        elif recipient is not None:
            self._calls.begin(piece, recipient[1])
            self._kind = "call"
        elif any(re.search(rf"\b{re.escape(name)}\b", header) for name in self._channels.reasoning):
            self._kind = "reasoning"
        else:
            self._kind = "content"

    def _close(self) -> None:
        self._kind = "none"
        self._header = ""
        self._blanks = []
        self._bare = False

    def _say(self, text: str, piece: Piece) -> None:
        if not text:
            return
        if self._kind == "header":
            self._header = (self._header + text)[:_HEADER_CHARACTERS]
        elif self._kind == "call":
            self._calls.argue(piece, text)
        else:
            self._tell(text, piece)

    def _tell(self, text: str, piece: Piece) -> None:
        """Text without the white space at its ends, which belongs to the marks; a break between two texts."""
        if self._fresh:
            text = text.lstrip() if self._kind != "none" else text
            if not text.strip():
                self._blanks += [text] if text else []
                return
        words = text.rstrip()
        blank = text[len(words) :]
        self._bare = self._bare or (bool(words) and self._kind == "none")
        if not words:
            self._blanks.append(blank)
            return
        words = "".join([*self._blanks, words])
        self._blanks = [blank] if blank else []
        parted = "\n\n" if self._fresh and self._kind in self._kinds_before else ""
        if self._kind == "reasoning":
            piece.reasoning += "" if self._hidden else parted + words
        else:
            piece.text += parted + words
        self._kinds_before.add(self._kind)
        self._fresh = False
