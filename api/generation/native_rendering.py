"""The answers to /completion and /infill in llama.cpp's form: parts of the text, and counts, settings and times with
the last part of each choice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from api.chat.answer import FAILURES
from api.chat.piece import Piece, ScoredToken
from api.chat.tokens import Vocabulary
from api.generation.chunks import StreamRenderer, finite
from api.http.errors import problem
from api.schemas.answers import Timings, encode
from api.schemas.llama_cpp import (
    FIELDS,
    FILLS,
    PROMPT_TOKENS,
    PROMPTS,
    SETTINGS,
    SHOWS_IDS,
    NativeLogprob,
    NativePart,
    NativeResult,
    NativeTokenLogprob,
)
from api.schemas.view import StreamCursor, View

# Parts of an entry.
_TEXT = 1
_LAST = 2


class NativeRenderer(StreamRenderer):
    """Renders the choices of one or several prompts. A stream ends with the events that have `stop: true`, one for each
    choice, without `[DONE]`."""

    def __init__(
        self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int, resume: StreamCursor | None = None
    ) -> None:
        super().__init__(rid, view, vocabulary, prompt_tokens, resume)
        self._vocabulary = vocabulary
        self._fields: dict[str, Any] = view.extra_fields
        self._with_lines = set[int]()
        """Choices whose text has a new line."""

    def _collect(self, whole: Piece, piece: Piece) -> None:
        whole.encoded += self._scores(piece.scored)
        piece.scored = []
        whole.collect(piece)

    def end(self, error: BaseException | None = None) -> bytes:
        events: list[bytes] = []
        error = error or self.failure
        if error is not None:
            self._event(0, (self.answers[0].seq, _LAST), b"data: " + problem(error).encode() + b"\n\n", events)
        return b"".join(events)

    def whole(self, pieces: list[Piece]) -> bytes:
        """One answer, or a list of several."""
        results: list[NativeResult | dict[str, Any]] = []
        for index, piece in enumerate(pieces):
            self._note_lines(index, piece)
            ids = piece.ids if self._fields.get(SHOWS_IDS) else []
            results.append(self._last(index, piece, piece.text, ids, piece.encoded))
        return encode(results[0] if len(results) == 1 else results)

    def _open(self) -> list[bytes]:
        self._opened = True
        return []

    def _write(self, member: int, piece: Piece, events: list[bytes]) -> None:
        index = member * self._view.n + piece.choice
        self._note_lines(index, piece)
        if not piece.silent:
            part = NativePart(
                index=index,
                content=piece.text,
                tokens=piece.ids,
                tokens_predicted=piece.tokens,
                tokens_evaluated=self._evaluated(index),
                completion_probabilities=UNSET if self._view.logprobs is None else self._scores(piece.scored),
                timings=self._timings(index, piece) if self._view.timed else UNSET,
            )
            self._event(member, (piece.seq, _TEXT), _event(part), events)
        if piece.finish is not None and piece.finish not in FAILURES:
            self._event(member, (piece.seq, _LAST), _event(self._last(index, piece, "", [], [])), events)

    def _note_lines(self, index: int, piece: Piece) -> None:
        if "\n" in piece.text:
            self._with_lines.add(index)

    def _last(
        self, index: int, piece: Piece, text: str, ids: list[int], scores: list[NativeTokenLogprob]
    ) -> NativeResult | dict[str, Any]:
        """The end of a choice, or the fields of it that the client chose."""
        evaluated = self._evaluated(index)
        settings: dict[str, Any] | UnsetType = self._fields.get(SETTINGS, UNSET)
        result = NativeResult(
            index=index,
            content=text,
            tokens=ids,
            model=self.view.model,
            tokens_predicted=piece.tokens,
            tokens_evaluated=evaluated,
            has_new_line=index in self._with_lines,
            truncated=piece.finish == "length" and bool(self._fields.get(FILLS)),
            stop_type="limit" if piece.finish == "length" else "eos" if piece.stop is None else "word",
            stopping_word=piece.stop or "",
            tokens_cached=piece.tokens + evaluated,
            timings=self._timings(index, piece),
            generation_settings=settings,
            prompt=UNSET if settings is UNSET else self._fields[PROMPTS][index // self._view.n],
            completion_probabilities=scores or UNSET,
        )
        fields: list[str] = self._fields.get(FIELDS) or []
        if not fields:
            return result
        if not any(path.startswith("completion_probabilities") for path in fields):
            result.completion_probabilities = UNSET  # they may be many, and would be copied
        return selected(msgspec.to_builtins(result), fields)

    def _evaluated(self, index: int) -> int:
        """Tokens of the prompt that a choice continues."""
        counts: list[int] | None = self._fields.get(PROMPT_TOKENS)
        return self._prompt_tokens if counts is None else counts[index // self._view.n]

    def _timings(self, index: int, piece: Piece) -> Timings:
        cached = self.answers[index // self._view.n].cached_tokens
        return self._durations.timings(self._evaluated(index), cached, piece.tokens)

    def _scores(self, tokens: Iterable[ScoredToken]) -> list[NativeTokenLogprob]:
        if self._view.logprobs is None:
            return []
        return [
            NativeTokenLogprob(
                *self._score(token.token, token.logprobs.chosen),
                top_logprobs=[NativeLogprob(*self._score(other, logprob)) for other, logprob in token.logprobs.top],
            )
            for token in tokens
            if token.logprobs is not None
        ]

    def _score(self, token: int, logprob: float) -> tuple[int, str, list[int], float]:
        """The fields of NativeLogprob."""
        raw = self._vocabulary.token_bytes(token)
        return token, raw.decode(errors="replace"), [*raw], finite(logprob)


def selected(answer: dict[str, Any], paths: list[str]) -> dict[str, Any]:
    """Only these fields of an answer, by their paths as `timings/prompt_n`, of those that it has."""
    shown: dict[str, Any] = {}
    for path in paths:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, UNSET) if isinstance(value, dict) else UNSET  # type: ignore[union-attr]
        if value is not UNSET:
            shown[path] = value
    return shown


def _event(data: NativePart | NativeResult | dict[str, Any]) -> bytes:
    return b"data: " + encode(data) + b"\n\n"
