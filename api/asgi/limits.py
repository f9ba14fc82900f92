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
    connections: int = 8192
    """Beyond it the connection closes that has waited longest without a request; with none, the new one gets 503."""
    pipelined: int = 16
    """Requests that wait behind the one that is answered; what comes after them is not read."""
    rest_timeout: float = 5.0
    """For the rest of a body whose request was answered before it had come whole; then the connection is closed."""
    rest_bytes: int = 8 * MIB
    """How much of that rest is read."""
