"""Request bodies as they come in: their size, their speed, and how much of them this process holds at a time.

The values of a JSON body are counted before it is decoded: decoding takes time for each, and holds the interpreter.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from litestar import Request

from api.http.errors import BodyTooSlow, ClientDisconnected, TooManyBodies
from control.errors import RequestError, RequestTooLarge

KIB = 1024
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Sizes are in bytes, times in seconds."""

    text_bytes: int = 6 * MIB
    """The most that a text route reads, however large a model's context is. Decoding so much takes some 20 ms."""
    memory_bytes: int = 64 * MIB
    """All bodies that are read, checked and tokenised at one time."""
    small_bytes: int = 64 * KIB
    """A body of up to this size may exceed its owner's share."""
    grace: float = 10.0
    bytes_per_second: int = 16 * KIB
    """The least average speed of a body, after the grace."""

    @property
    def share_bytes(self) -> int:
        """Bytes for the bodies of one tenant, or of all callers without a key."""
        return max(self.memory_bytes // 4, self.text_bytes)

    def share_of(self, most: int) -> int:
        """As `share_bytes`, where a body may have `most` bytes; at least one with images."""
        return max(self.share_bytes, most) if most > IMAGE_BYTES else self.share_bytes


IMAGE_BYTES = 28 * MIB
"""A text route reads so much more where a model takes images: 20 MiB in base64."""
LEAST_TEXT_BYTES = 4 * MIB
"""A text route reads so much for any model."""
OPERATOR_BYTES = 64 * KIB
"""The largest body that the operator's routes read."""
_ROOM_BYTES = 1 * MIB
"""For tools, schemas and what is not text."""
_MOST_TOKEN_BYTES = 32
"""Longer tokens are runs of one character; no text has only those."""


def text_bytes(context: int, longest_token: int) -> int:
    """The size of a body that holds a text of a whole context, written with JSON's escapes."""
    return max(LEAST_TEXT_BYTES, _ROOM_BYTES + context * min(longest_token, _MOST_TOKEN_BYTES))


MOST_VALUES = 524_288
"""Values of one body: about 20 ms to decode."""
_WEIGHT = 8
"""The weight of an object's member, an object or an array, where a plain value of an array weighs 1."""
_PIECE_BYTES = 64 * 1024
"""Looked through in less than a millisecond."""


class Structure:
    """Counts a body's values as its chunks come. Exact up to the first byte that is no JSON, where decoding ends."""

    SURELY_SIMPLE_BYTES = MOST_VALUES // _WEIGHT
    """A body up to this size can't have too many."""

    def __init__(self) -> None:
        self.values = 0
        self._chunks_counted = 0
        self._in_text = False
        self._escape = b""

    async def look_through(self, chunks: list[bytes]) -> None:
        """Count what was not counted yet, with pauses for the streams. Raises RequestError for too many values."""
        while self._chunks_counted < len(chunks):
            chunk = chunks[self._chunks_counted]
            self._chunks_counted += 1
            for start in range(0, len(chunk), _PIECE_BYTES):
                self.count(chunk[start : start + _PIECE_BYTES])
                await asyncio.sleep(0)

    def count(self, piece: bytes) -> None:
        piece = (self._escape + piece).replace(b"\\\\", b"")
        self._escape = b"\\" if piece.endswith(b"\\") else b""
        parts = piece.removesuffix(self._escape).replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[1::2] if self._in_text else parts[::2])
        self._in_text ^= len(parts) % 2 == 0
        heavy = outside.count(b":") + outside.count(b"[") + outside.count(b"{")
        self.values += outside.count(b",") + _WEIGHT * heavy
        if self.values > MOST_VALUES:
            raise RequestError(
                f"The request body has too many values: an array or object and each member of one count as {_WEIGHT}, "
                f"other values as 1, and {MOST_VALUES} are read. Send several requests.",
                code="request_too_complex",
            )


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
        self._owner_bytes = Counter[str]()

    @property
    def held_bytes(self) -> int:
        return sum(self._owner_bytes.values())

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
        upload = _Upload(owner, most, self._limits.grace)
        structure = Structure()
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
            self._owner_bytes[owner] -= upload.size
            if not self._owner_bytes[owner]:
                del self._owner_bytes[owner]

    async def _next(self, request: Request[Any, Any, Any], upload: _Upload) -> tuple[bytes, bool]:
        """The next chunk, and whether more come."""
        limits = self._limits
        clock = asyncio.get_running_loop().time
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
        size = len(chunk)
        share = self._limits.share_of(upload.most)
        if upload.size + size > self._limits.small_bytes:
            while self._owner_bytes[upload.owner] + size > share:
                self._make_room(upload, size, upload.owner)
        while self.held_bytes + size > self._limits.memory_bytes:
            self._make_room(upload, size, max(self._owner_bytes, key=self._owner_bytes.__getitem__))
        upload.size += size
        upload.chunks.append(chunk)
        self._owner_bytes[upload.owner] += size

    def _make_room(self, newcomer: _Upload, size: int, owner: str) -> None:
        coming = [upload for upload in self._uploads if upload.owner == owner and upload.timeout is not None]
        largest = max(coming, key=lambda upload: upload.size, default=None)
        if largest is None or largest.size <= newcomer.size + size:
            raise _full(newcomer.size)
        assert largest.timeout is not None
        largest.gives_way = True
        if not largest.timeout.expired():
            largest.timeout.reschedule(asyncio.get_running_loop().time())
        largest.timeout = None
        # Its memory is free before its own task sees the refusal.
        self._owner_bytes[owner] -= largest.size
        largest.size = 0
        largest.chunks.clear()


def _full(size: int) -> TooManyBodies:
    return TooManyBodies(
        f"This API process is reading as many requests as its memory for bodies holds; this one ({size} bytes so far) "
        "is the largest of them that can wait. Retry shortly."
    )


def _too_large(most: int, size: str) -> RequestTooLarge:
    limit = f"{most / MIB:g} MiB" if most >= MIB else f"{most / KIB:g} KiB"
    return RequestTooLarge(f"The request body is too large: {size}, where this route reads {limit}. Send less.")


def _check_encoding(encoding: str) -> None:
    if encoding.strip().lower() not in ("", "identity"):
        raise RequestError(
            f"The body comes with Content-Encoding {encoding[:40]!r}; this server reads no compressed one. Send it "
            "plain.",
            param="content-encoding",
            code="unsupported_content_encoding",
        )
