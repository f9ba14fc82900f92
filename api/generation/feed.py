"""One reader's place in one request's token log: the seq of its last entry, and a few entries that wait for it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

import msgspec

from control.messages import LogEntry
from control.requests import Enqueue, Place
from control.requests.token_log import TokenLog

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Enqueue).decode

BUFFER_ENTRIES = 256
"""Entries that wait for a reader that is slower than the model; whatever comes after is read from the log later."""


class Feed:
    """Delivers a request's log entries from seq 1, in order, each once.

    Entries arrive from the live channel and from reads of the log, in any mixture and with repeats; what does not fit
    is forgotten and fetched again. Entries that were handed out are kept, packed, until the reader is done: after a
    failover it may be the only copy.
    """

    def __init__(self, model: str, rid: str, tenant: str, wake: asyncio.Event, now: float) -> None:
        self.model = model
        self.rid = rid
        self.tenant = tenant
        self.wake = wake
        self.on_entries: Callable[[], object] = wake.set
        """Called where entries have come that the reader has not taken."""
        self.heard_at = now
        """Loop time of the last news, live or read."""
        self.quiet_reads = 0
        """Reads of the log in a row that brought nothing new."""
        self.fields: dict[str, str] = {}
        """The request's hash as last read: state, ticket, t_claimed …"""
        self.queued = False
        """True while `QueuedFeeds` looks after it: as far as is known it waits in the queue, with an empty log."""
        self.slot = 0
        """The tick of `QueuedFeeds` that looks at it next."""
        self.looks = 0
        """The number of times that it was looked at."""
        self.position: int | None = None
        """Place in the model's queue, from 1; None when it is not known."""
        self.shown: int | None = None
        """The place that the client was shown last."""
        self.show_at = math.inf
        """Loop time from which the client may be shown another place; infinite for a client that is shown none."""
        self.claim_at: float | None = None
        """Loop time at which it is expected to be claimed; None when that is not known."""
        self.error: Exception | None = None
        """The reason why no more entries will come, where the log has no end of its own."""
        self.begun = False
        """True once Redis has had the request. Only from then on does its absence mean that it was lost."""
        self._origin: bytes | None = None
        self.entries = TokenLog()
        """Everything that was handed out or is ready, from seq 1: what Redis must know too, or is told again."""
        self.diverged = False
        """True after entries that contradict the feed. It takes no more until the log has been repaired."""
        self.missing_since: float | None = None
        """Loop time at which Redis first did not know the request."""
        self._taken = 0
        self._newest = 0
        self._on_hungry: Callable[[Feed], None] | None = None

    def on_hungry(self, call: Callable[[Feed], None]) -> None:
        """Have `call` fetch from the log when the buffer is empty and entries are known to be missing."""
        self._on_hungry = call

    def begin(self, origin: Enqueue | None = None) -> None:
        """The request is in Redis. `origin`: what was enqueued, by this process or another one, where it is known."""
        self.begun = True
        self._origin = None if origin is None else _pack(origin)

    @property
    def origin(self) -> Enqueue | None:
        """The enqueue that brings the request back after a loss of data; kept packed, since it is needed rarely."""
        return None if self._origin is None else _unpack(self._origin)

    @property
    def recoverable(self) -> bool:
        """True if `origin` is known."""
        return self._origin is not None

    @property
    def complete(self) -> bool:
        """True if the request has ended and all of its log is here."""
        ended = self.fields.get("state", "queued") not in ("queued", "running")
        return ended and self.have >= int(self.fields["seq"])

    @property
    def have(self) -> int:
        """Every entry up to this seq was handed out or is ready."""
        return len(self.entries)

    @property
    def behind(self) -> bool:
        """True if entries exist that are not here: after a gap in the live channel, or with a slow reader."""
        return self._newest > self.have

    @property
    def waiting(self) -> bool:
        """True if the reader has taken every entry."""
        return self._taken == self.have

    @property
    def ended_without_token(self) -> bool:
        """True if the first entry ends its choice with no token: refused by the leader, cancelled or expired."""
        return (
            self._taken == 0 and bool(self.entries) and self.entries[0].token is None and bool(self.entries[0].finish)
        )

    def offer(
        self, entries: Sequence[LogEntry], now: float, more: bool = False, rest: bool = False, whole: bool = False
    ) -> None:
        """Take entries in ascending order of seq, skipping what was seen before.

        `more`: the log goes on after them. `rest`: they are all that the log has from here on. `whole`: take them all,
        however far behind the reader is, because they can be had only now.
        """
        have = self.have
        self.heard_at = now
        most = have + len(entries) if whole else BUFFER_ENTRIES
        if rest and (not entries or entries[-1].seq <= have):
            self._newest = have  # what was announced beyond is not there (any more): it will be announced again
        if more:
            self._newest = max(self._newest, entries[-1].seq + 1)
        for entry in entries:
            seq = entry.seq
            if seq > self._newest:
                self._newest = seq
            if seq <= have:
                self.diverged |= not same(entry, self.entries[seq - 1])
            elif seq == have + 1 and not self.diverged and have - self._taken < most:
                self.entries.append(entry)
                have = seq
        if have > self._taken:
            self.quiet_reads = 0
            self.on_entries()
        if self.diverged or self._newest > have:
            self._ask()

    def placed(self, place: Place, now: float) -> bool:
        """It waits at this place. True if the reader is woken, because the client is to be shown it."""
        self.position = place.position
        self.claim_at = None if place.expected_wait_s is None else now + place.expected_wait_s
        if place.position == self.shown or now < self.show_at:
            return False
        self.wake.set()
        return True

    def repaired(self) -> None:
        """The log begins with `entries` again; what was announced beyond them may never have been."""
        self.diverged = False
        self._newest = self.have

    def take(self, most: int | None = None) -> list[LogEntry]:
        """The entries that are ready, at most so many: the reader is woken again for the rest. No entry is no end."""
        start = self._taken
        have = self.have
        ready = have - start
        if most is None or ready <= most:
            entries = self.entries.since(start)
            self._taken = have
        else:
            entries = self.entries[start : start + most]
            self._taken = start + most
            self.wake.set()
        if entries and (self.diverged or self._newest > have):
            self._ask()
        return entries

    def fail(self, error: Exception) -> None:
        self.error = error
        self.diverged = False
        self.wake.set()

    def _ask(self) -> None:
        if (self.diverged or (self.behind and self.waiting)) and self._on_hungry is not None:
            self._on_hungry(self)


def same(one: LogEntry, other: LogEntry) -> bool:
    """True if both entries are the same place of the same answer."""
    return (one.choice, one.token, one.finish) == (other.choice, other.token, other.finish)
