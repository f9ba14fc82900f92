"""Cuts the bytes of a stream into whole events and remembers the place from which it can be continued."""

from __future__ import annotations

import json
import re

INTERRUPTED = "stream_interrupted"
"""Error code of an answer that goes on though this connection ends: it is resumed, and the client never sees it."""

_BORDER = re.compile(rb"\r?\n\r?\n")
_COMMENT = re.compile(rb":[^\n]*\n|\r?\n")
"""A comment or an empty line before an event: whole by itself."""
_ID = re.compile(rb"^id: ?([^\r\n]*)", re.M)
_DATA = re.compile(rb"^data: ?([^\r\n]*)", re.M)
_ERROR = re.compile(rb'\{"(?:error"|type":"error")')
_END = re.compile(rb'\[DONE\]$|\{"type":"(?:response\.(?:completed|incomplete|failed)|message_stop)"')
"""The last event of each kind of stream that the API sends."""


class EventReader:
    """Passes on whole events only: what a cut leaves of an event is dropped, and comes again after the resume."""

    def __init__(self) -> None:
        self.last_id: str | None = None
        """The id of the last event that was passed on."""
        self.delivered = False
        """Whether any event (comments don't count) was passed on."""
        self.ended = False
        """Whether the answer's end was passed on, or an error for good."""
        self.interrupted = False
        """Whether the server has said that it goes and the answer stays."""
        self._partial = b""

    @property
    def resumable(self) -> bool:
        """Whether repeating the request loses and repeats nothing: a place is known, or nothing was passed on."""
        return self.last_id is not None or not self.delivered

    def feed(self, data: bytes) -> bytes:
        """The events and comments that are whole with `data`, byte for byte; nothing after an interruption."""
        self._partial += data
        passed = 0
        while border := _COMMENT.match(self._partial, passed) or _BORDER.search(self._partial, passed):
            if not self._read(self._partial[passed : border.start()]):
                break
            passed = border.end()
        whole, self._partial = self._partial[:passed], self._partial[passed:]
        return whole

    def rest(self) -> bytes:
        """What follows the last border at a clean end of a stream that is not continued."""
        rest, self._partial = self._partial, b""
        return rest

    def reconnected(self) -> None:
        """The next bytes begin an event."""
        self._partial, self.interrupted = b"", False

    def _read(self, event: bytes) -> bool:
        """Note what one event says; False for the one that must not be passed on."""
        data = _DATA.search(event)
        if data is None:
            return True  # nothing for the client: a comment
        if _ERROR.match(data[1]):
            if _code(data[1]) == INTERRUPTED:
                self.interrupted = True
                return False
            self.ended = True
        self.ended = self.ended or _END.match(data[1]) is not None
        self.delivered = True
        if identity := _ID.search(event):
            self.last_id = identity[1].decode()
        return True


def _code(data: bytes) -> str | None:
    try:
        told = json.loads(data)
    except ValueError:
        return None
    error = told.get("error")
    return error.get("code") if isinstance(error, dict) else told.get("code")
