"""Limits on what one connection, and all of them together, may send before a request is known."""

from __future__ import annotations

from dataclasses import dataclass

KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Sizes are in bytes, times in seconds."""

    head_bytes: int = 64 * KIB
    """Request line, header lines and trailers of one request; beyond it 431."""
    head_lines: int = 256
    """Header lines: each costs Python some 130 bytes beside its own."""
    head_timeout: float = 10.0
    """From the first byte of a head, or from the connection's begin, to the head's end."""
    heads_bytes: int = 16 * MIB
    """All heads that are not complete; beyond it the oldest connection with a part of one is closed."""
    unread_bytes: int = 64 * MIB
    """Bodies whose requests wait for their turn; beyond it the request gets 429 whose body comes."""
    admission_s: float = 3.0
    """Work of a tenant's requests that wait for their turn, in seconds of the event loop; beyond it they get 429."""
    connections: int = 8192
    """Beyond it the connection closes that has waited longest without a request; with none, the new one gets 503."""
    pipelined: int = 16
    """Requests that wait behind the one that is answered; what comes after them is not read."""
    rest_timeout: float = 5.0
    """For the rest of a body whose request was answered before it had come whole; then the connection is closed."""
    rest_bytes: int = 8 * MIB
    """How much of that rest is read."""


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
