"""One reader's place in one request's token log: a small buffer, and beyond it only a position."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from api.token_log import TokenLog
from control.messages import LogEntry
from control.requests import Enqueue

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Enqueue).decode

BUFFER_ENTRIES = 256
"""Entries kept for a reader that is slower than the model; whatever comes after is read from the log later."""


class Feed:
    """Delivers a request's log entries from seq 1, in order, each once.

    Entries arrive from the live channel and from reads of the log, in any mixture and with repeats; what does not fit
    is forgotten and fetched again, so a slow reader costs a number, not memory.
    """

    def __init__(self, model: str, rid: str, tenant: str, wake: asyncio.Event, now: float) -> None:
        self.model, self.rid, self.tenant = model, rid, tenant
        self.wake = wake
        self.heard_at = now
        """Loop time of the last news, live or read."""
        self.quiet_reads = 0
        """Reads of the log in a row that brought nothing new."""
        self.fields: dict[str, str] = {}
        """The request's hash as last read: state, ticket, t_claimed …"""
        self.position: int | None = None
        """Place in the model's queue, from 1; None when it is not known."""
        self.error: Exception | None = None
        """Why no more entries will come, where the log has no end of its own."""
        self._origin: bytes | None = None
        self.delivered = TokenLog()
        """What the reader took, kept only where the origin is known."""
        self.missing_since: float | None = None
        """Loop time at which Redis first did not know the request."""
        self._buffer: deque[LogEntry] = deque()
        self._tail = 0
        self._newest = 0
        self._on_hungry: Callable[[Feed], None] | None = None

    def on_hungry(self, call: Callable[[Feed], None]) -> None:
        """Have `call` fetch from the log when the buffer is empty and entries are known to be missing."""
        self._on_hungry = call

    @property
    def origin(self) -> Enqueue | None:
        """What was enqueued, if it was by this process: enough to bring the request back after a loss of data.

        Kept packed, a few bytes for each token of the prompt: it is needed rarely, and every open stream has one.
        """
        return None if self._origin is None else _unpack(self._origin)

    @origin.setter
    def origin(self, origin: Enqueue) -> None:
        self._origin = _pack(origin)

    @property
    def have(self) -> int:
        """Every entry up to this seq was handed out or is in the buffer."""
        return self._tail

    @property
    def behind(self) -> bool:
        """Whether entries exist that are not in the buffer: a gap in the live channel, or a full buffer."""
        return self._newest > self._tail

    @property
    def waiting(self) -> bool:
        """Whether the reader has taken all there is."""
        return not self._buffer

    @property
    def ended_without_token(self) -> bool:
        """Whether the first entry ends its choice with no token: refused by the leader, cancelled or expired."""
        return bool(self._buffer) and self._buffer[0].seq == 1 and self._buffer[0].token is None

    def offer(self, entries: Sequence[LogEntry], now: float, more: bool = False) -> None:
        """Take entries in ascending order of seq, skipping what was seen before. `more`: the log goes on after them."""
        self.heard_at = now
        if more:
            self._newest = max(self._newest, entries[-1].seq + 1)
        for entry in entries:
            if entry.seq > self._newest:
                self._newest = entry.seq
            if entry.seq == self._tail + 1 and len(self._buffer) < BUFFER_ENTRIES:
                self._buffer.append(entry)
                self._tail = entry.seq
        if self._buffer:
            self.quiet_reads = 0
            self.wake.set()
        self._ask()

    def take(self) -> list[LogEntry]:
        """The entries that are ready; an empty list is no end."""
        taken = list(self._buffer)
        self._buffer.clear()
        if taken:
            if self._origin is not None:
                self.delivered.extend(taken)
            self._ask()
        return taken

    def fail(self, error: Exception) -> None:
        self.error = error
        self.wake.set()

    def _ask(self) -> None:
        if self.behind and not self._buffer and self._on_hungry is not None:
            self._on_hungry(self)
