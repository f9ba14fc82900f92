"""The answers to /completion and /infill in llama.cpp's form: parts of the text, and counts, settings and times with
the last part of each choice."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from api.chat.piece import Piece, ScoredToken
from api.chat.tokens import Vocabulary
from api.errors.errors import problem
from api.rendering.chunks import StreamRenderer, finite
from api.schemas.llama_cpp import FIELDS, FILLS, PROMPT_TOKENS, PROMPTS, SETTINGS, SHOWS_IDS
from api.schemas.view import Cursor, View
from control.messages import LogEntry

_json = msgspec.json.Encoder().encode
_TEXT, _LAST = 1, 2
"""Parts of an entry."""
_FAILED = ("cancelled", "expired", "unavailable", "error")


class NativeRenderer(StreamRenderer):
    """Renders the choices of one or several prompts. A stream ends with the events that have `stop: true`, one for each
    choice, without `[DONE]`."""

    def __init__(
        self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int, resume: Cursor | None = None
    ) -> None:
        super().__init__(rid, view, vocabulary, prompt_tokens, resume)
        self._vocabulary = vocabulary
        self._fields: dict[str, Any] = view.extra_fields
        self._with_lines = set[int]()
        """Choices whose text has a new line."""

    def feed(self, member: int, entries: list[LogEntry]) -> bytes:
        self._durations.note_token()
        return super().feed(member, entries)

    def collect(self, pieces: list[Piece], member: int, entries: list[LogEntry]) -> None:
        self._durations.note_token()
        for entry in entries:
            piece = self.answers[member].feed(entry)
            whole = pieces[member * self._view.n + piece.choice]
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
        answers: list[dict[str, Any]] = []
        for index, piece in enumerate(pieces):
            self._note_lines(index, piece)
            ids = piece.ids if self._fields.get(SHOWS_IDS) else []
            answers.append(self._last(index, piece, piece.text, ids, piece.encoded))
        return _json(answers[0] if len(answers) == 1 else answers)

    def _open(self) -> list[bytes]:
        self._opened = True
        return []

    def _write(self, member: int, piece: Piece, events: list[bytes]) -> None:
        index = member * self._view.n + piece.choice
        self._note_lines(index, piece)
        if not piece.silent:
            part: dict[str, Any] = {
                "index": index,
                "content": piece.text,
                "tokens": piece.ids,
                "stop": False,
                "id_slot": -1,
                **self._counts(index, piece),
            }
            if self._view.logprobs is not None:
                part["completion_probabilities"] = self._scores(piece.scored)
            if self._view.timed:
                part["timings"] = self._timings(index, piece)
            self._event(member, (piece.seq, _TEXT), _event(part), events)
        if piece.finish is not None and piece.finish not in _FAILED:
            self._event(member, (piece.seq, _LAST), _event(self._last(index, piece, "", [], [])), events)

    def _note_lines(self, index: int, piece: Piece) -> None:
        if "\n" in piece.text:
            self._with_lines.add(index)

    def _last(self, index: int, piece: Piece, text: str, ids: list[int], scores: list[Any]) -> dict[str, Any]:
        member = index // self._view.n
        counts = self._counts(index, piece)
        answer: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": ids,
            "id_slot": -1,
            "stop": True,
            "model": self.view.model,
            **counts,
            "has_new_line": index in self._with_lines,
            "truncated": piece.finish == "length" and bool(self._fields.get(FILLS)),
            "stop_type": "limit" if piece.finish == "length" else "eos" if piece.stop is None else "word",
            "stopping_word": piece.stop or "",
            "tokens_cached": sum(counts.values()),
            "timings": self._timings(index, piece),
        }
        if SETTINGS in self._fields:
            answer["generation_settings"] = self._fields[SETTINGS]
            answer["prompt"] = self._fields[PROMPTS][member]
        if scores:
            answer["completion_probabilities"] = scores
        return selected(answer, self._fields.get(FIELDS) or [])

    def _counts(self, index: int, piece: Piece) -> dict[str, int]:
        return {"tokens_predicted": piece.tokens, "tokens_evaluated": self._evaluated(index)}

    def _evaluated(self, index: int) -> int:
        """Tokens of the prompt that a choice continues."""
        counts: list[int] | None = self._fields.get(PROMPT_TOKENS)
        return self._prompt_tokens if counts is None else counts[index // self._view.n]

    def _timings(self, index: int, piece: Piece) -> dict[str, float]:
        cached = self.answers[index // self._view.n].cached_tokens
        return self._durations.timings(self._evaluated(index), cached, piece.tokens)

    def _scores(self, tokens: Iterable[ScoredToken]) -> list[dict[str, Any]]:
        if self._view.logprobs is None:
            return []
        return [
            self._score(token.token, token.logprobs.chosen)
            | {"top_logprobs": [self._score(other, logprob) for other, logprob in token.logprobs.top]}
            for token in tokens
            if token.logprobs is not None
        ]

    def _score(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.token_bytes(token)
        return {"id": token, "token": raw.decode(errors="replace"), "bytes": [*raw], "logprob": finite(logprob)}


def selected(answer: dict[str, Any], fields: list[str]) -> dict[str, Any]:
    """Only these fields of an answer, by their paths as `timings/prompt_n`, of those that it has; all without any."""
    if not fields:
        return answer
    shown: dict[str, Any] = {}
    for path in fields:
        value: Any = answer
        for name in path.split("/"):
            value = value.get(name, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET  # type: ignore[union-attr]
        if value is not msgspec.UNSET:
            shown[path] = value
    return shown


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + _json(data) + b"\n\n"
