"""From log entries to typed events: /v1/responses and /v1/messages.

Unlike chat's chunks, events are not joined: each entry of the log always makes the same ones, so that their numbers and
places are a function of the log alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import structs

from api.chat.piece import Piece
from api.chat.tokens import Vocabulary
from api.generation.chunks import StreamRenderer
from api.generation.message_events import MessageEventBuilder
from api.generation.response_events import ResponseEventBuilder
from api.generation.seals import Seal
from api.schemas.answers import encode
from api.schemas.messages import MessageEvent, MessageObject
from api.schemas.response_answers import ResponseEvent, ResponseObject, Status
from api.schemas.view import StreamCursor, View
from control.messages import LogEntry

Event = ResponseEvent | MessageEvent


class EventRenderer(StreamRenderer):
    """Renders an answer of one choice; `resume` and `starting_after` suppress what the client already has."""

    def __init__(
        self,
        rid: str,
        view: View,
        vocabulary: Vocabulary,
        prompt_tokens: int,
        resume: StreamCursor | None = None,
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
        whole = self._builder.whole()
        if self._view.timed and not isinstance(whole, MessageObject):
            whole.timings = self.timings(self.usage.completion_tokens)
        return encode(whole)

    def so_far(self, status: Status) -> ResponseObject:
        whole = self._builder.whole()
        assert isinstance(whole, ResponseObject)
        return structs.replace(whole, status=status)

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
        if self._view.timed:
            for event in events:
                if isinstance(event, ResponseEvent) and tag_of(event).endswith(".delta"):
                    event.timings = self.timings(self.usage.completion_tokens)
        return self._written(piece.seq, events)

    def _end(self, error: BaseException | None) -> Sequence[Event]:
        if self._ended:
            return []
        self._ended = True
        events: Sequence[Event] = self._builder.end(self.usage, error or self.failure, self.ended_s or time.time())
        if self._view.timed and isinstance(events[-1], ResponseEvent):
            events[-1].timings = self.timings(self.usage.completion_tokens)
        return events

    def _written(self, seq: int, events: Sequence[Event]) -> list[bytes]:
        """The bytes of those events that the client does not have; all of them are numbered."""
        chunks: list[bytes] = []
        for event in events:
            self._part += 1
            place = (seq, self._part)
            if place > self._resumed_at[0] and (not self._numbered or self._number > self.starting_after):
                self._cursor.places[0] = place
                chunks.append(b"id: " + self._cursor.encode() + b"\n" + self._bytes(event))
            self._number += 1
        return chunks

    def _bytes(self, event: Event) -> bytes:
        if isinstance(event, ResponseEvent):
            event.sequence_number = self._number
        return b"event: " + tag_of(event).encode() + b"\ndata: " + encode(event) + b"\n\n"


def tag_of(event: Event) -> str:
    """The type of an event, which is its name too."""
    return str(event.__struct_config__.tag)
