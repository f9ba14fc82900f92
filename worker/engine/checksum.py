"""The checksum of a step, by which a rank that ran something else is found."""

from __future__ import annotations

import struct
import zlib

from worker.models.batch import Row


def checksum(before: int, rows: list[Row], tokens: list[int]) -> int:
    """crc32 over what was before (the seq, then the forward before this one), each row's (sid, offset, count) and the
    tokens, as little-endian 64-bit numbers."""
    numbers = [before, *(part for row in rows for part in (row.sid, row.offset, len(row.tokens))), *tokens]
    return zlib.crc32(struct.pack(f"<{len(numbers)}q", *numbers))
