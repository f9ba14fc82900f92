"""Splits an answer into the model's reasoning, `<think>…</think>` at its beginning, and the rest."""

from __future__ import annotations

from typing import Literal

from api.schemas.view import ThinkingMarks
from control.text.text_stream import partial_match_length

_BEFORE_OPENING = 256
"""The most white space before an opening mark."""


class ThinkingParser:
    """`push` returns what of the text is reasoning, and what comes after it; white space at the marks is neither."""

    def __init__(self, thinking: ThinkingMarks) -> None:
        self._open = thinking.open
        self._close = thinking.close
        self._begun = thinking.begun
        self._state: Literal["opening", "thinking", "gap", "after"] = "thinking" if thinking.continued else "opening"
        self._pending = ""
        self._blanks: list[str] = []
        """White space after the reasoning that was returned; it is reasoning where more follows."""
        self._mark = ""
        """A control token with which the opening mark may begin."""
        self._reasoned = thinking.continued
        """True once reasoning was returned."""

    @property
    def thinking(self) -> bool | None:
        """True if the next text is reasoning; None while that is unknown."""
        if self._state == "opening":
            return True if self._begun else None
        return self._state == "thinking"

    def takes(self, mark: str) -> bool:
        """True if a mark that comes now opens or closes the reasoning."""
        if self._state == "thinking":
            together = self._pending + mark
            return self._close in together or partial_match_length(together, (self._close,)) > 0
        if self._state == "opening" and self._open.startswith(self._pending.lstrip() + mark):
            self._mark = self._pending.lstrip() + mark
            return True
        return False

    def reopen(self, thinking: ThinkingMarks) -> None:
        """Reasoning has begun once more."""
        self._open = thinking.open
        self._close = thinking.close
        self._state = "thinking"
        self._reasoned = False

    def push(self, text: str) -> tuple[str, str]:
        self._pending += text
        reasoning = ""
        if self._state == "opening":
            self._opening()
        if self._state == "thinking":
            reasoning = self._think()
        if self._state == "gap":
            self._pending = self._pending.lstrip()
            if self._pending:
                self._state = "after"
        return reasoning, self._take() if self._state == "after" else ""

    def end(self) -> tuple[str, str]:
        """The rest of reasoning and text, at the end of the answer."""
        if self._state == "opening":
            return (self._unmarked(), "") if self._begun else ("", self._unmarked())
        return ("".join([*self._blanks, self._take()]), "") if self._state == "thinking" else ("", "")

    def _opening(self) -> None:
        """A model whose prompt has opened the reasoning may still repeat the mark."""
        start = self._pending.lstrip()
        late = len(self._pending) - len(start) > _BEFORE_OPENING
        if not late and len(start) < len(self._open) and self._open.startswith(start):
            return
        if not late and start.startswith(self._open):
            self._pending, self._state = start[len(self._open) :], "thinking"
        else:
            self._pending = self._unmarked()
            self._state = "thinking" if self._begun else "after"

    def _think(self) -> str:
        at = self._pending.find(self._close)
        cut = at if at >= 0 else len(self._pending) - partial_match_length(self._pending, (self._close,))
        text = self._pending[:cut] if self._reasoned else self._pending[:cut].lstrip()
        self._pending = self._pending[cut:]
        reasoning = text.rstrip()
        blank = text[len(reasoning) :]
        if reasoning:
            reasoning = "".join([*self._blanks, reasoning])
            self._blanks = []
            self._reasoned = True
        if at >= 0:
            self._pending, self._blanks, self._state = self._pending[len(self._close) :], [], "gap"
        elif blank:
            self._blanks.append(blank)
        return reasoning

    def _unmarked(self) -> str:
        """The pending text without a control token that began no mark."""
        return self._take().replace(self._mark, "", 1) if self._mark else self._take()

    def _take(self) -> str:
        pending, self._pending = self._pending, ""
        return pending
