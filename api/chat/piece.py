"""The part of an answer that one or more tokens added: text, reasoning, calls of tools, and log probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from control.messages import FinishReason, PromptToken, TokenLogprobs


@dataclass(slots=True)
class ScoredToken:
    """A token, its log probability (a prompt's first token has none), and the place of its text in its choice's."""

    token: int
    logprobs: TokenLogprobs | None
    start: int
    end: int


@dataclass(slots=True)
class CallDelta:
    """A part of one call. The first has the function's `name`; `arguments` is the next part of a JSON text."""

    index: int
    """The call's place among the choice's calls, from 0."""
    id: str
    name: str | None = None
    arguments: str = ""

    @property
    def continues(self) -> bool:
        """True if this is no beginning of a call."""
        return self.name is None


class Piece(msgspec.Struct):
    """The part of an answer that one entry of the log, or several consecutive ones of one choice, added.

    Reasoning comes before text, text before calls: pieces are joined only where that is the order of what was said.
    """

    seq: int
    choice: int
    text: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = []
    scored: list[ScoredToken] = []
    prompt: list[PromptToken] = []
    """Tokens of the prompt, where they are shown beside the answer; never in a stream."""
    ids: list[int] = []
    """Token ids of the entries, where they are shown."""
    tokens: int = 0
    """Tokens of the choice up to the end of this piece, where each chunk shows them."""
    encoded: list[Any] = []
    encoded_prompt: list[Any] = []
    """Of an answer that is not streamed: `scored` and `prompt` so far, as its writer encodes them."""
    finish: FinishReason | None = None
    stop: str | None = None
    """The stop string that ended the choice, where one did."""

    @property
    def silent(self) -> bool:
        return not (self.text or self.reasoning or self.calls or self.scored or self.ids)

    def mute(self) -> None:
        """Forget all but the end: the client has the rest already."""
        self.text = self.reasoning = ""
        self.calls = []
        self.scored = []
        self.ids = []

    def add_call(self, delta: CallDelta) -> None:
        """Add a part of a call; parts of one call in a row become one."""
        last = self.calls[-1] if self.calls else None
        if last is not None and last.index == delta.index and delta.name is None:
            last.arguments += delta.arguments
        else:
            self.calls.append(delta)

    def join(self, other: Piece) -> bool:
        """Take a later piece of the same choice into this one; False where that would change what a client sees."""
        if other.choice != self.choice or self.finish is not None:
            return False
        if (other.reasoning and (self.text or self.calls)) or (other.text and self.calls):
            return False
        self.collect(other)
        return True

    def collect(self, other: Piece) -> None:
        """Take in a later piece of the same choice where only the sums are shown, not the order."""
        self.seq = other.seq
        self.finish = other.finish
        self.stop = other.stop
        self.text += other.text
        self.reasoning += other.reasoning
        for delta in other.calls:
            self.add_call(delta)
        self.scored += other.scored
        self.prompt += other.prompt
        self.ids += other.ids
        self.tokens = other.tokens
