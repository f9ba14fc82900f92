"""Server-sent events: bytes cut into whole events, and the place from which a stream can be continued.

httpx-sse is no replacement: it drops comments, and the bytes of an event, which a transport has to pass on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

INTERRUPTED = "stream_interrupted"
"""Error code of an answer that goes on though this connection ends: it is resumed, and the client never sees it."""

_UNIT = re.compile(rb":[^\n]*+\n|(?:[^\r\n][^\n]*+\n)*+\r?\n")
"""A comment, which ends with its line, or the lines of an event and the empty line that ends it."""
_USUAL = re.compile(rb"id: ([^\r\n]*+)\n(?:event: [^\r\n]*+\n)?data: ([^\r\n]*+)\n\n")
"""An event in the form that the API writes. It is matched as a whole, because benchmarks read many streams."""
_ERROR = re.compile(rb'\{"(?:error"|type":"error")')
_END = re.compile(rb'\[DONE\]$|\{"type":"(?:response\.(?:completed|incomplete|failed)|message_stop)"')
"""The last event of each kind of stream that the API sends."""


class Event(NamedTuple):
    """One event, or one comment, which has no data. `id` is empty where it has none; `raw` are all its bytes."""

    id: str
    data: bytes
    raw: bytes


class EventParser:
    """Cuts a stream into events. `rest` are the bytes of the one that is not whole yet."""

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """The events and comments that are whole with `data`."""
        events, at, data = list[Event](), 0, self.rest + data
        while at < len(data) and (unit := _USUAL.match(data, at) or _UNIT.match(data, at)):
            events.append(Event(unit[1].decode(), unit[2], unit[0]) if unit.re is _USUAL else _event(unit[0]))
            at = unit.end()
        self.rest = data[at:]
        return events


def _event(raw: bytes) -> Event:
    identity = b""
    lines = list[bytes]()
    for line in raw.splitlines():
        if line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"id:"):
            identity = line[3:].removeprefix(b" ")
    return Event(identity.decode(), b"\n".join(lines), raw)


def parsed(stream: Iterable[bytes]) -> Iterator[Event]:
    """The events and comments of a stream that comes in any parts."""
    parser = EventParser()
    for data in stream:
        yield from parser.feed(data)


class EventReader:
    """Passes on whole events only: what a cut leaves of an event is dropped, and comes again after the resume."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        """The id of the last event that was passed on."""
        self.delivered = False
        """True once an event (comments don't count) was passed on."""
        self.ended = False
        """True once the end of the answer, or a final error, was passed on."""
        self.interrupted = False
        """True once the server reported that it stops while the answer continues."""
        self._parser = EventParser()

    @property
    def resumable(self) -> bool:
        """True if repeating the request loses and repeats nothing: a place is known, or nothing was passed on."""
        return self.last_id is not None or not self.delivered

    def feed(self, data: bytes) -> bytes:
        """The events and comments that are whole with `data`, byte for byte; nothing after an interruption."""
        events = self._parser.feed(data)
        passed = 0
        while passed < len(events) and self._note(events[passed]):
            passed += 1
        self._parser.rest = _joined(events[passed:]) + self._parser.rest
        return _joined(events[:passed])

    def rest(self) -> bytes:
        """The bytes after the last whole event, at a clean end of a stream that is not continued."""
        rest, self._parser.rest = self._parser.rest, b""
        return rest

    def reconnected(self) -> None:
        """Begin a new connection: its first bytes begin an event."""
        self._parser.rest, self.interrupted = b"", False

    def _note(self, event: Event) -> bool:
        """Note the content of an event; False for the one that must not be passed on."""
        if not event.data:
            return True  # a comment
        if _ERROR.match(event.data):
            if _code(event.data) == INTERRUPTED:
                self.interrupted = True
                return False
            self.ended = True
        self.ended = self.ended or _END.match(event.data) is not None
        self.delivered = True
        self.last_id = event.id or self.last_id
        return True


def _joined(events: list[Event]) -> bytes:
    return b"".join([event.raw for event in events])


def _code(data: bytes) -> str | None:
    try:
        body = json.loads(data)
    except ValueError:
        return None
    error = body.get("error")
    return error.get("code") if isinstance(error, dict) else body.get("code")
