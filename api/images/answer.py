"""The answer of a host that an image is fetched from, read within bounds."""

from __future__ import annotations

import httptools

from control.errors import FurrowError

_REDIRECTS = (301, 302, 303, 307, 308)
_HEAD_BYTES = 64 * 1024
"""Of status line and fields, and of what chunks of a body bring beside its bytes."""


class AnswerRefused(FurrowError):
    """An answer that is no image; the text says why."""


class Oversized(FurrowError):
    """A body with more bytes than there is room for."""


class Answer:
    """One answer while it comes. `location`: where it redirects to, None where it does not."""

    def __init__(self, room: int) -> None:
        self.location: str | None = None
        self.complete = False
        self.body = bytearray()
        self._room, self._read = room, 0
        self._fields: dict[str, str] = {}
        self._refused: FurrowError | None = None
        self._parser = httptools.HttpResponseParser(self)

    def feed(self, chunk: bytes) -> None:
        """The next bytes, none at the connection's end. Raises AnswerRefused, Oversized."""
        if not chunk:
            self._end()
            return
        self._read += len(chunk)
        if self._read - len(self.body) > _HEAD_BYTES + len(chunk):
            raise AnswerRefused("its answer has a head of too many bytes")
        try:
            self._parser.feed_data(chunk)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._refused is None and not self.complete:
                raise AnswerRefused("its host does not answer in HTTP/1.1") from error
        if self._refused is not None:
            raise self._refused

    def _end(self) -> None:
        framed = "content-length" in self._fields or "transfer-encoding" in self._fields
        if framed or not self.body:
            raise AnswerRefused("its host ended the connection early")
        self.complete = True

    # --- what the parser calls; an error that is raised here would lose its type ---

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status, length = self._parser.get_status_code(), self._fields.get("content-length", "")
        coding = self._fields.get("content-encoding", "identity").strip().lower()
        if status in _REDIRECTS:
            self.location, self.complete = self._fields.get("location", ""), True
        elif status != 200:
            self._refused = AnswerRefused(f"its host answers with status {status}")
        elif coding not in ("", "identity"):
            self._refused = AnswerRefused(f"its host sends it compressed ({coding[:20]!r}), unasked")
        elif length.isascii() and length.isdigit() and (len(length) > 15 or int(length) > self._room):
            self._refused = Oversized()

    def on_body(self, data: bytes) -> None:
        if self.complete or self._refused is not None:
            return
        if len(self.body) + len(data) > self._room:
            self._refused = Oversized()
        else:
            self.body += data

    def on_message_complete(self) -> None:
        self.complete = True
