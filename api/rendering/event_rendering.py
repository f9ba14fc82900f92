"""From log entries to typed events: /v1/responses and /v1/messages.

Unlike chat's chunks, events are not joined: each entry of the log always makes the same ones, so that their numbers and
places are a function of the log alone.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from api.chat.piece import Piece
from api.chat.tokens import Vocabulary
from api.rendering.chunks import Event, StreamRenderer
from api.rendering.message_events import MessageEventBuilder
from api.rendering.output_items import Seal
from api.rendering.response_events import ResponseEventBuilder
from api.schemas.view import Cursor, View
from control.messages import LogEntry

_json = msgspec.json.Encoder().encode


class EventRenderer(StreamRenderer):
    """Renders an answer of one choice; `resume` and `starting_after` suppress what the client already has."""

    def __init__(
        self,
        rid: str,
        view: View,
        vocabulary: Vocabulary,
        prompt_tokens: int,
        resume: Cursor | None = None,
        seal: Seal | None = None,
    ) -> None:
        super().__init__(rid, view, vocabulary, prompt_tokens, resume)
        self._builder: ResponseEventBuilder | MessageEventBuilder
        if view.endpoint == "responses":
            self._builder = ResponseEventBuilder(rid, view, vocabulary, seal)
        else:
            self._builder = MessageEventBuilder(rid, view)
        self._numbered = view.endpoint == "responses"
        self._number = self._part = 0
        self._ended = False
        self.ended_s: float | None = None
        """Unix seconds of the answer's end, where it is known from elsewhere; else it ends when its end is told."""

    def prelude(self) -> bytes:
        return b"".join(self._begun())

    def feed(self, member: int, entries: list[LogEntry]) -> bytes:
        self._durations.note_token()
        events = self._begun()
        for entry in entries:
            events += self._tell(self.answers[member].feed(entry))
        return b"".join(events)

    def collect(self, pieces: list[Piece], member: int, entries: list[LogEntry]) -> None:
        """`pieces` is not used: the event builder keeps the order in which thoughts, text and calls came."""
        self._durations.note_token()
        for entry in entries:
            self._builder.tell(self.answers[member].feed(entry), self.usage)

    def end(self, error: BaseException | None = None) -> bytes:
        return b"".join([*self._begun(), *self._written(self.answers[0].seq, self._end(error))])

    def whole(self, pieces: list[Piece]) -> bytes:
        self._end(None)
        return _json(self._timed(self._builder.whole()))

    def so_far(self) -> dict[str, Any]:
        """The answer as far as it has come."""
        return self._builder.whole()

    @property
    def to_store(self) -> bytes | None:
        return self.whole([]) if self.finished and self._view.extra_fields.get("store") else None

    def interruption(self, error: BaseException) -> bytes:
        return self._bytes(self._builder.interrupted(error))

    def _begun(self) -> list[bytes]:
        if self._opened:
            return []
        self._opened = True
        return self._written(0, self._builder.begin())

    def _tell(self, piece: Piece) -> list[bytes]:
        self._part = 0
        events = self._builder.tell(piece, self.usage)
        return self._written(piece.seq, [self._timed(one) if one["type"].endswith(".delta") else one for one in events])

    def _end(self, error: BaseException | None) -> list[Event]:
        if self._ended:
            return []
        self._ended = True
        *events, last = self._builder.end(self.usage, error or self.failure, self.ended_s or time.time())
        return [*events, self._timed(last)]

    def _timed(self, fields: dict[str, Any]) -> dict[str, Any]:
        """With llama.cpp's `timings`, where the client asks for them."""
        return {**fields, "timings": self.timings(self.usage.completion_tokens)} if self._view.timed else fields

    def _written(self, seq: int, events: list[Event]) -> list[bytes]:
        """The bytes of those events that the client does not have; all of them are numbered."""
        written: list[bytes] = []
        for event in events:
            self._part += 1
            place = (seq, self._part)
            if place > self._had[0] and (not self._numbered or self._number > self.starting_after):
                self._cursor.places[0] = place
                written.append(b"id: " + self._cursor.encode() + b"\n" + self._bytes(event))
            self._number += 1
        return written

    def _bytes(self, event: Event) -> bytes:
        data = {**event, "sequence_number": self._number} if self._numbered else event
        return b"event: " + event["type"].encode() + b"\ndata: " + _json(data) + b"\n\n"
