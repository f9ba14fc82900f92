"""From log entries to text: what one request's choices said so far, as a pure function of the entries.

Fed the same entries, an `Answer` gives the same pieces, whichever process does it: that is what makes a stream
resumable.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from api.chat.prompt import PromptText
from api.chat.tokens import Vocabulary
from api.errors import GenerationFailed
from api.schemas.view import View
from control.messages import FinishReason, LogEntry, PromptToken, TokenLogprobs
from control.text import Detokenizer, StopStrings

_FAILURES: dict[str, tuple[str, int]] = {
    "cancelled": ("request_cancelled", 409),
    "expired": ("deadline_exceeded", 503),
    "error": ("generation_failed", 500),
}
"""Ends that no model decided: their machine-readable code, and the status when nothing was sent yet."""


@dataclass(slots=True)
class ScoredToken:
    """A token with its log probability, and where its text lies in the choice's text (in characters).

    The first token of a prompt has none.
    """

    token: int
    logprobs: TokenLogprobs | None
    start: int
    end: int


@dataclass(slots=True)
class Piece:
    """What one entry, or several consecutive ones of one choice, added to the answer."""

    seq: int
    choice: int
    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list[ScoredToken])
    prompt: list[PromptToken] = field(default_factory=list[PromptToken])
    finish: FinishReason | None = None

    @property
    def silent(self) -> bool:
        return not self.text and not self.scored

    def join(self, other: Piece) -> bool:
        """Take a later piece of the same choice into this one; False where that would change what a client sees."""
        if other.choice != self.choice or self.finish is not None:
            return False
        self.seq, self.finish = other.seq, other.finish
        self.text += other.text
        self.scored += other.scored
        self.prompt += other.prompt
        return True


class _Choice:
    """The text of one choice while it grows; cut exactly where the leader cuts, because both use control.text.

    With `echo` its prompt's text comes first, with the tokens' log probabilities, if these are wanted; else whoever
    opens the choice has shown it.
    """

    def __init__(self, vocabulary: Vocabulary, view: View, echo: str) -> None:
        self._view = view
        self._prompt = PromptText(vocabulary, echo if view.logprobs is not None else "")
        self._detokenizer = Detokenizer(vocabulary.decode_all if view.special_tokens else vocabulary.decode)
        self._stops = StopStrings(view.stop)
        self._unsearched = view.min_tokens
        self._stop_ids = set(view.stop_ids)
        self._produced = len(echo)
        """Characters of text so far, those included that a possible stop string holds back."""
        self._sent = len(echo)
        self._waiting: deque[ScoredToken] = deque()
        self.finish: FinishReason | None = None

    def push(self, entry: LogEntry) -> Piece:
        if entry.prompt is not None:
            return self._prompt_piece(entry, entry.prompt)
        piece = Piece(entry.seq, entry.choice, finish=entry.finish)
        self.finish = entry.finish
        stopped = False
        if entry.token is not None and not self._ends_without_text(entry):
            start = self._produced
            piece.text, stopped = self._text(self._detokenizer.push(entry.token))
            if entry.logprobs is not None:
                self._waiting.append(ScoredToken(entry.token, entry.logprobs, start, self._produced))
        if entry.finish is not None and not stopped:
            rest, stopped = self._text(self._detokenizer.flush())
            piece.text += rest if stopped else rest + self._stops.flush()
        self._sent += len(piece.text)
        while self._waiting and self._waiting[0].end <= self._sent:
            piece.scored.append(self._waiting.popleft())
        if entry.finish is not None:
            # Of the tokens that made up a stop string only one that began before it is shown.
            piece.scored += [token for token in self._waiting if token.start < self._sent]
        piece.text = self._prompt.take_rest() + piece.text
        return piece

    def _prompt_piece(self, entry: LogEntry, tokens: list[PromptToken]) -> Piece:
        """A part of the prompt: to be shown as text, or beside it."""
        view, piece = self._view, Piece(entry.seq, entry.choice)
        if view.prompt_logprobs is not None:
            piece.prompt = tokens
        if view.echo and view.logprobs is not None:
            for token in tokens:
                start, end, text = self._prompt.push(token.token)
                known = None if token.logprob is None else TokenLogprobs(token.logprob, token.top[: view.logprobs])
                piece.scored.append(ScoredToken(token.token, known, start, end))
                piece.text += text
        return piece

    def _text(self, text: str) -> tuple[str, bool]:
        """What of new text may be sent, and whether a stop string was completed."""
        self._produced += len(text)
        if self._unsearched > 0:
            self._unsearched -= 1
            return text, False
        certain, stop = self._stops.push(text)
        return certain + (stop or "") if self._view.include_stop else certain, stop is not None

    def _ends_without_text(self, entry: LogEntry) -> bool:
        """Whether a stop id ended the choice: its text is not part of the answer, that of a stop string's token is."""
        return entry.finish == "stop" and entry.token in self._stop_ids and not self._view.include_stop


class Answer:
    """All choices of one request; `echo` is its prompt's text where it is shown before each."""

    def __init__(self, vocabulary: Vocabulary, view: View, echo: str = "") -> None:
        self._choices = [_Choice(vocabulary, view, echo) for _ in range(view.n)]
        self.seq = 0
        self.completion_tokens = self.cached_tokens = 0
        self.failure: GenerationFailed | None = None

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        return [choice.finish for choice in self._choices]

    def feed(self, entry: LogEntry) -> Piece:
        """Take the next entry of the log; entries must come in order and without a gap."""
        if entry.seq != self.seq + 1:
            raise ValueError(f"entry {entry.seq} of the token log came after entry {self.seq}")
        self.seq = entry.seq
        self.completion_tokens += entry.token is not None
        self.cached_tokens += entry.cached or 0
        if entry.finish in _FAILURES:
            code, status = _FAILURES[entry.finish]
            text = entry.cause or f"The request ended as {entry.finish}."
            self.failure = self.failure or GenerationFailed(text, code=code, status=status)
        return self._choices[entry.choice].push(entry)
