"""Request bodies as they come in: their size, their speed, and how much of them this process holds at a time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from litestar import Request

from api.asgi.limits import KIB, MIB, BodyLimits
from api.asgi.structure import Structure
from api.errors.errors import BodyTooSlow, ClientDisconnected, TooManyBodies
from control.errors import RequestError, RequestTooLarge


@dataclass(eq=False, slots=True)
class _Upload:
    """A body that comes in, or whose request is not queued yet."""

    owner: str
    most: int
    patience: float
    """Seconds for which the client is waited for: what it sends adds to them, up to the grace."""
    size: int = 0
    timeout: asyncio.Timeout | None = None
    """Of the wait for the next chunk; None where none is waited for."""
    gives_way: bool = False
    chunks: list[bytes] = field(default_factory=list[bytes])


class Bodies:
    """Counts the bytes of the bodies that were begun and not yet turned into queued requests.

    Each owner, a tenant or all callers without a key together, has a share of the memory. Where a share or the whole is
    full, the largest upload gives way to a smaller one, so that stalled uploads lock no client out.
    """

    def __init__(self, limits: BodyLimits) -> None:
        self._limits = limits
        self._uploads: dict[_Upload, None] = {}
        self._held = Counter[str]()

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    @asynccontextmanager
    async def reading(self, request: Request[Any, Any, Any], most: int, owner: str) -> AsyncGenerator[bytes]:
        """The whole body, of at most `most` bytes; it counts until the block is left.

        It is not kept with the request, which lives as long as the answer. Raises TooManyBodies, BodyTooSlow,
        RequestTooLarge, ClientDisconnected, and RequestError for one that is compressed or has too many values.
        """
        _check_encoding(request.headers.get("content-encoding", ""))
        announced = request.headers.get("content-length", "")
        if announced.isdigit() and int(announced) > most:
            raise _too_large(most, f"{int(announced)} bytes")
        upload, structure = _Upload(owner, most, self._limits.grace), Structure()
        self._uploads[upload] = None
        try:
            # Received bytes count, not announced ones: a client that sends nothing must not keep others out.
            more = True
            while more:
                chunk, more = await self._next(request, upload)
                if upload.size + len(chunk) > most:
                    raise _too_large(most, "more")
                self._take(upload, chunk)
                if upload.size > Structure.SURELY_SIMPLE_BYTES:
                    await structure.look_through(upload.chunks)
            body = b"".join(upload.chunks)
            upload.chunks.clear()
            yield body
        finally:
            del self._uploads[upload]
            self._held[owner] -= upload.size
            if not self._held[owner]:
                del self._held[owner]

    async def _next(self, request: Request[Any, Any, Any], upload: _Upload) -> tuple[bytes, bool]:
        """The next chunk, and whether more come."""
        limits, clock = self._limits, asyncio.get_running_loop().time
        began = clock()
        try:
            async with asyncio.timeout(max(0.0, upload.patience)) as upload.timeout:
                message: Any = await request.receive()
        except TimeoutError:
            if upload.gives_way:
                raise _full(upload.size) from None
            raise BodyTooSlow(
                f"The body came too slowly: {upload.size} bytes, then too few for {limits.grace:g} s. At least "
                f"{limits.bytes_per_second // KIB} KiB/s are needed. Send it faster, or send less."
            ) from None
        finally:
            upload.timeout = None
            upload.patience -= clock() - began  # the client's time alone counts: this process may be busy
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        if upload.gives_way:
            raise _full(upload.size)
        chunk: bytes = message.get("body", b"")
        upload.patience = min(limits.grace, upload.patience + len(chunk) / limits.bytes_per_second)
        return chunk, message.get("more_body", False)

    def _take(self, upload: _Upload, chunk: bytes) -> None:
        """Count and keep a chunk. Raises TooManyBodies where the upload itself is the largest."""
        size, share = len(chunk), self._limits.share_of(upload.most)
        if upload.size + size > self._limits.small_bytes:
            while self._held[upload.owner] + size > share:
                self._make_room(upload, size, upload.owner)
        while self.held_bytes + size > self._limits.memory_bytes:
            self._make_room(upload, size, max(self._held, key=self._held.__getitem__))
        upload.size += size
        upload.chunks.append(chunk)
        self._held[upload.owner] += size

    def _make_room(self, newcomer: _Upload, size: int, owner: str) -> None:
        coming = [one for one in self._uploads if one.owner == owner and one.timeout is not None]
        largest = max(coming, key=lambda one: one.size, default=None)
        if largest is None or largest.size <= newcomer.size + size:
            raise _full(newcomer.size)
        assert largest.timeout is not None
        largest.gives_way = True
        if not largest.timeout.expired():
            largest.timeout.reschedule(asyncio.get_running_loop().time())
        largest.timeout = None
        # Its memory is free before its own task sees the refusal.
        self._held[owner] -= largest.size
        largest.size = 0
        largest.chunks.clear()


def _full(size: int) -> TooManyBodies:
    return TooManyBodies(
        f"This API process is reading as many requests as its memory for bodies holds; this one ({size} bytes so far) "
        "is the largest of them that can wait. Retry shortly."
    )


def _too_large(most: int, sent: str) -> RequestTooLarge:
    limit = f"{most / MIB:g} MiB" if most >= MIB else f"{most / KIB:g} KiB"
    return RequestTooLarge(f"The request body is too large: {sent}, where this route reads {limit}. Send less.")


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise RequestError(
            f"The body comes with Content-Encoding {encoding[:40]!r}; this server reads no compressed one. Send it "
            "plain.",
            param="content-encoding",
            code="unsupported_content_encoding",
        )
