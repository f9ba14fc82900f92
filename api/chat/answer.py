"""From log entries to the text of a request's choices, and of prompts that are shown back.

A pure function, so that any process can resume a stream.
"""

from __future__ import annotations

import codecs
from collections import deque

from api.chat.piece import Piece, ScoredToken
from api.chat.reading.parser import AnswerParser
from api.chat.tokens import Vocabulary
from api.http.errors import GenerationFailed
from api.schemas.view import View
from control.errors import RETRY_AFTER_S
from control.messages import FinishReason, LogEntry, PromptToken, TokenLogprobs
from control.text.text_stream import Detokenizer, StopStrings


def prompt_text(vocabulary: Vocabulary, tokens: list[int]) -> str:
    """The text of a prompt that was sent as token ids, special tokens written out."""
    return b"".join(map(vocabulary.token_bytes, tokens)).decode(errors="replace")


class Prompt:
    """The prompt of one choice as a client is shown it: before the answer, beside it, or not at all.

    With `echo` its text comes with the log probabilities of its tokens; without these, the choice's opening shows it.
    """

    def __init__(self, vocabulary: Vocabulary, view: View, echo: str) -> None:
        self._text = PromptAlignment(vocabulary, echo) if echo and view.logprobs is not None else None
        self._view = view

    def push(self, entry: LogEntry, tokens: list[PromptToken]) -> Piece:
        """The next tokens, which `entry` tells."""
        piece = Piece(entry.seq, entry.choice)
        if self._view.prompt_logprobs is not None:
            piece.prompt = tokens
        if self._text is None:
            return piece
        for token in tokens:
            start, end, text = self._text.push(token.token)
            logprobs = None if token.logprob is None else TokenLogprobs(token.logprob, token.top[: self._view.logprobs])
            piece.scored.append(ScoredToken(token.token, logprobs, start, end))
            piece.text += text
        return piece

    def take_rest(self) -> str:
        """The rest of the prompt that is shown before the answer."""
        return "" if self._text is None else self._text.take_rest()


class PromptAlignment:
    """Walks over the tokens of a prompt's text; characters that are split over tokens begin and end with the last one.

    What stands between text and tokens is allowed for: a beginning-of-sequence token that the text has not, and a
    space that the vocabulary puts in front. Where a tokenizer changes its text otherwise, the places are near.
    """

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        self._vocabulary = vocabulary
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at = 0
        self._begun = False

    def take_rest(self) -> str:
        """The text after the tokens that were walked over, once."""
        rest = self._text[self._at :]
        self._at = len(self._text)
        return rest

    def push(self, token: int) -> tuple[int, int, str]:
        """Start and end of the next token, in characters, and its text."""
        start = self._at
        piece = self._decoder.decode(self._vocabulary.token_bytes(token))
        if not self._begun:
            piece = self._first(token, piece)
        self._at = min(start + len(piece), len(self._text))
        return start, self._at, self._text[start : self._at]

    def _first(self, token: int, piece: str) -> str:
        """The first piece as it is in the text, which may lack its beginning."""
        if self._text.startswith(piece):
            self._begun = bool(piece)
            return piece
        if token == self._vocabulary.bos:
            return ""
        self._begun = True
        return piece.removeprefix(" ")


FAILURES: dict[str, tuple[str, int]] = {
    "cancelled": ("request_cancelled", 409),
    "expired": ("deadline_exceeded", 503),
    "unavailable": ("model_unavailable", 503),
    "error": ("generation_failed", 500),
}
"""Ends that no model decided: their machine-readable code, and the status when nothing was sent yet."""


class _Choice:
    """The text of one choice while it grows; cut exactly where the leader cuts, as both use `control.text.text_stream`.

    `offset`: the characters of the prompt that are shown before it.
    """

    def __init__(self, vocabulary: Vocabulary, view: View, rid: str, choice: int, offset: int) -> None:
        self._view = view
        decode = vocabulary.decode_all if view.special_tokens else vocabulary.decode
        self._detokenizer = Detokenizer(decode, vocabulary.alone)
        self._stops = StopStrings(view.stop)
        self._stop_strings = set(view.stop)
        self._unsearched = view.min_tokens
        self._stop_ids = set(view.stop_ids)
        self._produced = offset
        """Characters of text so far, those included that a possible stop string holds back."""
        self._sent = offset
        """Characters that are surely part of the answer; what a parser holds back of them may still be unseen."""
        self._waiting: deque[ScoredToken] = deque()
        reading = view.reading
        self._parser = AnswerParser(reading, rid, choice) if reading is not None else None
        self._hidden = reading.marks if reading is not None and not view.special_tokens else {}
        self._marks: deque[tuple[int, str]] = deque()
        """Special tokens that the parser must see, and where in the text they stand."""
        self._ends_with_call = reading is not None and reading.calling is not None and not reading.calling.named
        self._undecided = 0
        shows_counts = view.continuous_usage or view.timed
        self._plain = reading is None and not view.stop and not view.return_ids and not shows_counts
        """True if text is sent as it comes, so that most tokens need no other check."""
        self._tokens = 0
        self.reasoning_tokens = 0
        self.finish: FinishReason | None = None

    def push(self, entry: LogEntry) -> Piece:
        if self._plain and entry.finish is None and entry.logprobs is None and entry.token is not None:
            text = self._detokenizer.push(entry.token)
            self._sent = self._produced = self._produced + len(text)
            return Piece(entry.seq, entry.choice, text)
        self._tokens += entry.token is not None
        piece = Piece(entry.seq, entry.choice, finish=entry.finish, tokens=self._tokens)
        if self._view.return_ids and entry.token is not None:
            piece.ids.append(entry.token)
        if entry.finish == "stop" and entry.cause in self._stop_strings and not self._ends_without_text(entry):
            piece.stop = entry.cause
        certain = self._certain(entry)
        if self._parser is None:
            piece.text = certain
        else:
            self._parse(certain, entry, piece, self._parser)
        self._sent += len(certain)
        while self._waiting and self._waiting[0].end <= self._sent:
            piece.scored.append(self._waiting.popleft())
        if entry.finish is not None:
            # Of the tokens that made up a stop string only one that began before it is shown.
            piece.scored += [token for token in self._waiting if token.start < self._sent]
        self.finish = piece.finish
        return piece

    def _certain(self, entry: LogEntry) -> str:
        """The text that is surely part of the answer since this entry."""
        certain = ""
        stopped = False
        if entry.token is not None and not self._ends_without_text(entry):
            start = self._produced
            if entry.token in self._hidden:
                self._marks.append((start, self._hidden[entry.token]))
            certain, stopped = self._text(self._detokenizer.push(entry.token))
            if entry.logprobs is not None:
                self._waiting.append(ScoredToken(entry.token, entry.logprobs, start, self._produced))
        elif entry.token is not None and entry.logprobs is not None and self._view.echo:
            # Programs that score an echoed prompt expect an entry for each generated token, the end too.
            self._waiting.append(ScoredToken(entry.token, entry.logprobs, self._produced, self._produced))
        if entry.finish is not None and not stopped:
            rest, stopped = self._text(self._detokenizer.flush())
            certain += rest if stopped else rest + self._stops.flush()
        return certain

    def _parse(self, certain: str, entry: LogEntry, piece: Piece, parser: AnswerParser) -> None:
        """Pass certain text, and the marks in it, through the parser."""
        before = parser.thinking
        at = self._sent
        while self._marks and self._marks[0][0] <= self._sent + len(certain):
            place, mark = self._marks.popleft()
            parser.push(certain[at - self._sent : place - self._sent], piece)
            parser.mark(mark, piece)
            at = place
        parser.push(certain[at - self._sent :], piece)
        if entry.finish is not None:
            parser.end(piece)
            if entry.finish == "stop" and parser.called and self._ends_with_call:
                piece.finish = "tool_calls"
        if entry.token is not None:
            self._count(before, parser.thinking)

    def _count(self, before: bool | None, after: bool | None) -> None:
        """A token belongs to the reasoning if the reasoning was open, or was opened by it."""
        if after is None:
            self._undecided += 1
        elif before or after:
            self.reasoning_tokens += 1 + self._undecided
            self._undecided = 0
        else:
            self._undecided = 0

    def _text(self, text: str) -> tuple[str, bool]:
        """The part of new text that may be sent, and True if a stop string was completed."""
        self._produced += len(text)
        if self._unsearched > 0:
            self._unsearched -= 1
            return text, False
        certain, stop = self._stops.push(text)
        return certain + (stop or "") if self._view.include_stop else certain, stop is not None

    def _ends_without_text(self, entry: LogEntry) -> bool:
        """True if a stop id ended the choice: its text is not part of the answer, that of a stop string's token is."""
        return entry.finish == "stop" and entry.token in self._stop_ids and not self._view.include_stop


class PieceDecoder:
    """All choices of one request; `echo` is its prompt's text where it is shown before each."""

    def __init__(self, vocabulary: Vocabulary, view: View, rid: str = "", echo: str = "") -> None:
        """`rid` is the request's own id; the ids of calls follow from it."""
        self._choices = [_Choice(vocabulary, view, rid, choice, len(echo)) for choice in range(view.n)]
        shown = bool(echo) or view.prompt_logprobs is not None
        self._prompts = [Prompt(vocabulary, view, echo) for _ in range(view.n)] if shown else None
        self.seq = 0
        self.completion_tokens = self.cached_tokens = self.predicted_tokens = 0
        self.fingerprint: str | None = None
        """That of the replica that computed the last token."""
        self.failure: GenerationFailed | None = None

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self._choices)

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        return [choice.finish for choice in self._choices]

    @property
    def reasoning_tokens(self) -> int:
        """Of the completion's tokens: those of the reasoning, its marks included."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    def feed(self, entry: LogEntry) -> Piece:
        """Take the next entry of the log; entries must come in order and without a gap."""
        if entry.seq != self.seq + 1:
            raise ValueError(f"entry {entry.seq} of the token log came after entry {self.seq}")
        self.seq = entry.seq
        self.completion_tokens += entry.token is not None
        self.cached_tokens += entry.cached or 0
        self.predicted_tokens += entry.predicted or 0
        self.fingerprint = entry.fingerprint or self.fingerprint
        if entry.finish in FAILURES:
            code, status = FAILURES[entry.finish]
            text = entry.cause or f"The request ended as {entry.finish}."
            retry_after = RETRY_AFTER_S if entry.finish == "unavailable" else None
            self.failure = self.failure or GenerationFailed(text, code=code, status=status, retry_after=retry_after)
        if self._prompts is None:
            return self._choices[entry.choice].push(entry)
        prompt = self._prompts[entry.choice]
        if entry.prompt is not None:
            return prompt.push(entry, entry.prompt)
        piece = self._choices[entry.choice].push(entry)
        piece.text = prompt.take_rest() + piece.text
        return piece
