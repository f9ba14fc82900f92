"""Counts the values of a JSON body before it is decoded: decoding takes time for each, and holds the interpreter."""

from __future__ import annotations

import asyncio

from control.errors import RequestError

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
        self._seen = 0
        self._in_text = False
        self._escape = b""

    async def look_through(self, chunks: list[bytes]) -> None:
        """Count what was not counted yet, with pauses for the streams. Raises RequestError for too many values."""
        while self._seen < len(chunks):
            chunk = chunks[self._seen]
            self._seen += 1
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
