"""From log entries to the bytes of a stream, as a pure state machine: event ids, joining, suppression after a resume.

The event id `<rid>:<seq>.<part>` names a place: seq is the log entry up to which everything was sent, part what of that
entry. A resumed stream replays the log from seq 1 through a fresh renderer and sends only what lies beyond the place.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import msgspec

from api.chat.answer import Answer
from api.chat.piece import Piece
from api.chat.tokens import Vocabulary
from api.errors.errors import GenerationFailed, problem
from api.errors.request_ids import member_rid
from api.rendering.chunks import DONE, Usage, writer
from api.schemas.view import Cursor, View
from control.messages import LogEntry

_TEXT, _FINISH, _USAGE, _DONE = 1, 2, 3, 4
"""Parts of an entry, in the order in which they are sent. Before entry 1, part k+1 of seq 0 opens choice k."""

TEXT_BYTES, SCORE_BYTES = 4, 30
"""Of a token in an answer, and of one log probability, about."""


def _scores_bytes(most_likely: int | None) -> int:
    return 0 if most_likely is None else SCORE_BYTES * (1 + most_likely)


class StreamRenderer:
    """Renders one answer of one or several members (prompts); `resume` suppresses what the client already has."""

    _kept: list[Piece] | None = None
    """The whole answer, of a stream too, where it is to outlive its request."""

    def __init__(
        self, rid: str, view: View, vocabulary: Vocabulary, prompt_tokens: int, resume: Cursor | None = None
    ) -> None:
        self.view = self._view = view
        self._writer = writer(rid, view, vocabulary, prompt_tokens)
        self._prompt_tokens = prompt_tokens
        self.answers = [
            Answer(vocabulary, view, member_rid(rid, member), view.echo_of(member)) for member in range(view.members)
        ]
        self._cursor = Cursor(rid, [(0, 0)] * view.members)
        self._had = list(resume.places) if resume is not None and resume.places else [(0, 0)] * view.members
        self._opened = False
        if view.endpoint == "chat" and view.told:
            self._kept = self.empty_pieces()
        self.starting_after = -1
        """Events with numbers up to this one are not sent, where the endpoint numbers its events."""

    def prelude(self) -> bytes:
        """Bytes that may be sent before the first token; otherwise they come with it."""
        return b""

    @property
    def finished(self) -> bool:
        return all(answer.finished for answer in self.answers)

    @property
    def failure(self) -> GenerationFailed | None:
        return next((answer.failure for answer in self.answers if answer.failure is not None), None)

    @property
    def place(self) -> str | None:
        """The id of the last event that the client has; None before the first."""
        places = [max(pair) for pair in zip(self._cursor.places, self._had, strict=True)]
        return Cursor(self._cursor.rid, places).encode().decode() if any(seq or part for seq, part in places) else None

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=sum(answer.completion_tokens for answer in self.answers),
            cached_tokens=sum(answer.cached_tokens for answer in self.answers),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in self.answers),
            predicted=self._predicted(),
        )

    def _predicted(self) -> tuple[int, int] | None:
        """Tokens of the prediction that the choices have, and those that they have not."""
        if not self._view.predicted:
            return None
        accepted = sum(answer.predicted_tokens for answer in self.answers)
        return accepted, self._view.predicted * self._view.n * len(self.answers) - accepted

    def feed(self, member: int, entries: list[LogEntry]) -> bytes:
        """The events for new entries of one member; neighbouring tokens of one choice become one chunk."""
        self._computed_by(self.answers[member].fingerprint or (entries[0].fingerprint if entries else None))
        events: list[bytes] = [] if self._opened else self._open()
        pending: Piece | None = None
        for entry in entries:
            if entry.fingerprint is not None:
                if pending is not None:
                    self._write(member, pending, events)
                    pending = None
                self._computed_by(entry.fingerprint)
            piece = self.answers[member].feed(entry)
            self._keep(member, piece)
            if (piece.seq, _TEXT) <= self._had[member]:
                piece.mute()
            if pending is None:
                pending = piece
            elif not pending.join(piece):
                self._write(member, pending, events)
                pending = piece
        if pending is not None:
            self._write(member, pending, events)
        return b"".join(events)

    def end(self, error: BaseException | None = None) -> bytes:
        """The last events: an error or the usage, then [DONE]."""
        events: list[bytes] = [] if self._opened else self._open()
        error = error or self.failure
        seq = self.answers[0].seq
        if error is not None:
            self._event(0, (seq, _USAGE), b"data: " + problem(error).encode() + b"\n\n", events)
        elif self._view.include_usage:
            self._event(0, (seq, _USAGE), self._writer.usage(self.usage), events)
        self._cursor.places[0] = (seq, _DONE)
        events.append(b"id: " + self._cursor.encode() + b"\n" + DONE)
        return b"".join(events)

    def _keep(self, member: int, piece: Piece) -> None:
        """Add a copy to the answer that is to be stored: the piece itself is joined with others and muted."""
        if self._kept is not None:
            kept = copy.copy(piece)
            kept.calls = [replace(delta) for delta in piece.calls]
            self._writer.collect(self._kept[member * self._view.n + piece.choice], kept)

    def _computed_by(self, fingerprint: str | None) -> None:
        """Show this fingerprint from now on, where one is known."""
        if fingerprint is not None:
            self._writer.computed_by(fingerprint)

    def empty_pieces(self) -> list[Piece]:
        """One piece per choice over all members, to collect an answer that is not streamed."""
        view = self._view
        return [Piece(0, choice, view.opening(member)) for member in range(view.members) for choice in range(view.n)]

    def whole(self, pieces: list[Piece]) -> bytes:
        """The body of an answer that is not streamed: one piece per choice. It has a fingerprint where all members have
        the same."""
        told = {answer.fingerprint for answer in self.answers}
        self._writer.computed_by(told.pop() if len(told) == 1 else None)
        return self._writer.whole(pieces, self.usage)

    @property
    def body_bytes(self) -> int:
        """About the size of what `whole` reads. The log probabilities of it are as large in its log."""
        view, usage = self._view, self.usage
        of_prompt = view.logprobs if view.prompt_logprobs is None and view.echo else view.prompt_logprobs
        prompt = usage.prompt_tokens * view.n * _scores_bytes(of_prompt)
        return prompt + usage.completion_tokens * (TEXT_BYTES + _scores_bytes(view.logprobs))

    def collect(self, pieces: list[Piece], member: int, entries: list[LogEntry]) -> None:
        """Add entries to an answer that is not streamed; `pieces` has one element per choice over all members."""
        if self._kept is not None:
            self._kept = pieces
        for entry in entries:
            piece = self.answers[member].feed(entry)
            self._writer.collect(pieces[member * self._view.n + piece.choice], piece)

    def so_far(self) -> dict[str, Any]:
        """The answer as far as it has come, where the endpoint shows that."""
        raise NotImplementedError

    @property
    def to_store(self) -> bytes | None:
        """The answer's body where it is to outlive its request, once it has ended; None for a chat that failed."""
        if self._kept is None or not self.finished or self.failure is not None:
            return None
        return self.with_request(self._kept)

    def with_request(self, pieces: list[Piece]) -> bytes:
        """The body of an answer with the fields of its request that are shown beside it."""
        body, told = self.whole(pieces), self._view.told
        return body[:-1] + b"," + msgspec.json.encode(told)[1:] if told else body

    def interruption(self, error: BaseException) -> bytes:
        """The last event of a stream that goes on elsewhere: without an id, so that it is no place, nor [DONE]."""
        return b"data: " + problem(error).encode() + b"\n\n"

    def _open(self) -> list[bytes]:
        self._opened = True
        events: list[bytes] = []
        for member in range(self._view.members):
            for choice in range(self._view.n):
                chunk = self._writer.opening(member * self._view.n + choice, self._view.opening(member))
                if chunk:
                    self._event(member, (0, choice + 1), chunk, events)
        return events

    def _write(self, member: int, piece: Piece, events: list[bytes]) -> None:
        index = member * self._view.n + piece.choice
        if not piece.silent:
            self._event(member, (piece.seq, _TEXT), self._writer.piece(index, piece), events)
        failed = piece.finish in ("cancelled", "expired", "unavailable", "error")
        if piece.finish is not None and not failed:
            self._event(member, (piece.seq, _FINISH), self._writer.finish(index, piece.finish, piece.tokens), events)

    def _event(self, member: int, place: tuple[int, int], chunk: bytes, events: list[bytes]) -> None:
        if place <= self._had[member]:
            return
        self._cursor.places[member] = place
        events.append(b"id: " + self._cursor.encode() + b"\n" + chunk)
