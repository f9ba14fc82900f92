"""An HTTP/1.1 client on plain asyncio streams: the load generator must cost less than what it measures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from ops.client.events import Event, EventParser


@dataclass(frozen=True, slots=True)
class Base:
    """Where the API listens."""

    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Base:
        """Raises ValueError for anything but http://HOST[:PORT]; a path such as /v1 is dropped."""
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"{url!r} is not http://HOST:PORT")
        return cls(parts.hostname, parts.port or 80)


@dataclass(slots=True)
class Response:
    """Status and headers (lower-case names); the body is read by `chunks` or `read`."""

    status: int
    headers: dict[str, str]
    _reader: asyncio.StreamReader

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises IncompleteReadError where the connection is cut before its end."""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await _line(self._reader)).partition(b";")[0], 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await _line(self._reader)
        else:
            yield await self._reader.readexactly(int(self.headers.get("content-length", "0")))

    async def read(self) -> bytes:
        return b"".join([chunk async for chunk in self.chunks()])

    async def events(self) -> AsyncIterator[Event]:
        """Each server-sent event; comments are skipped. Ends where the body ends."""
        parser = EventParser()
        async for chunk in self.chunks():
            for event in parser.feed(chunk):
                if event.data:
                    yield event


@asynccontextmanager
async def request(
    base: Base, method: str, path: str, *, body: bytes = b"", headers: dict[str, str] | None = None
) -> AsyncGenerator[Response]:
    """Send a request on a connection of its own; yields the response once its headers are there. Raises OSError."""
    reader, writer = await asyncio.open_connection(base.host, base.port, limit=2**20)
    try:
        lines = [f"{method} {path} HTTP/1.1", f"host: {base.host}:{base.port}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"content-length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        await writer.drain()
        status = int((await _line(reader)).split()[1])
        fields: dict[str, str] = {}
        while line := await _line(reader):
            name, _, value = line.decode("latin-1").partition(":")
            fields[name.strip().lower()] = value.strip()
        yield Response(status, fields, reader)
    finally:
        writer.close()


async def _line(reader: asyncio.StreamReader) -> bytes:
    """One line without its end. Raises IncompleteReadError at the end of the connection."""
    return (await reader.readuntil(b"\r\n"))[:-2]
