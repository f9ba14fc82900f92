"""The feeds of one answer, one for each member, and the wait of their reader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from math import ceil

from api.follow.feed import Feed
from api.follow.follow import Follower
from control.messages import LogEntry

_ALARMS_S = 0.05
"""Time between two moments at which alarms ring."""


class Feeds:
    """Follows the requests of one answer. `leave` must be called once the reader has all of it, or has left."""

    def __init__(self, follower: Follower, model: str, tenant: str, rid: str) -> None:
        self.model, self.rid = model, rid
        self.members: list[Feed] = []
        self.wake = asyncio.Event()
        """Set by news of any member. The reader clears it before it looks at them."""
        self._follower, self.tenant = follower, tenant
        self._alarm: asyncio.TimerHandle | None = None
        self._shown: int | None = None
        self._show_at = 0.0

    def open(self, rid: str) -> Feed:
        """Follow one more member from now on."""
        self.members.append(self._follower.open(self.model, rid, self.tenant, self.wake))
        return self.members[-1]

    def replace_last(self, rid: str) -> Feed:
        """Follow `rid`, which was joined by its Idempotency-Key, in place of the last member."""
        self._follower.close(self.members.pop())
        if not self.members:
            self.rid = rid
        return self.open(rid)

    async def meet(self) -> None:
        """Take up requests that other clients or processes began. Raises RequestNotFound, RedisUnavailable."""
        try:
            await self._follower.meet(self.members)
        except BaseException:
            self.leave()
            raise

    @property
    def ready(self) -> bool:
        """True if `take` has something."""
        return any(not feed.waiting for feed in self.members)

    @property
    def position(self) -> int | None:
        """The worst queue position of the members that still wait."""
        worst = None
        for feed in self.members:
            if feed.position is not None and feed.have == 0 and (worst is None or feed.position > worst):
                worst = feed.position
        return worst

    def watch_place(self) -> None:
        """From now on `wake` is set when `place_changed` becomes true."""
        for feed in self.members:
            feed.show_at = 0.0

    @property
    def place_changed(self) -> bool:
        """True if the client is to be shown the place, or its end."""
        position = self.position
        return position != self._shown and (position is None or asyncio.get_running_loop().time() >= self._show_at)

    def show_place(self, every_s: float) -> int | None:
        """The place that the client is shown now; the next one is due after so many seconds, its end at once."""
        self._shown, self._show_at = self.position, asyncio.get_running_loop().time() + every_s
        for feed in self.members:
            feed.shown, feed.show_at = feed.position, self._show_at
        return self._shown

    @property
    def expected_wait_ms(self) -> int | None:
        """Time until the last member that still waits is expected to be claimed; None where that can't be told."""
        at = [feed.claim_at for feed in self.members if feed.have == 0 and feed.claim_at is not None]
        rest = max(at, default=0.0) - asyncio.get_running_loop().time()
        return round(1000 * rest) if rest > 0 else None

    @property
    def started(self) -> bool:
        """True once a leader has claimed the request, or its end is known."""
        return any(feed.have or feed.error or feed.fields.get("state", "queued") != "queued" for feed in self.members)

    def check(self) -> None:
        """Raises the error for which a member gets no more entries."""
        for feed in self.members:
            if feed.error is not None:
                raise feed.error

    def take(self, most: int) -> Iterator[tuple[int, list[LogEntry]]]:
        """At most so many entries, by member; `wake` is set if more are ready."""
        for member, feed in enumerate(self.members):
            if not most:
                self.wake.set()
                return
            if entries := feed.take(most):
                most -= len(entries)
                yield member, entries

    async def wait(self, seconds: float) -> None:
        """Wait for news, at most about so long, or less."""
        if self.wake.is_set():
            return
        loop = asyncio.get_running_loop()
        # Alarms of many streams ring together: each turn of the event loop has a price of its own.
        until = ceil((loop.time() + seconds) / _ALARMS_S) * _ALARMS_S
        # Most waits end with a token soon: an alarm that is set already is left as it is, and may wake for nothing.
        if self._alarm is None or self._alarm.when() > until:
            self._disarm()
            self._alarm = loop.call_at(until, self._ring)
        await self.wake.wait()

    async def rest(self) -> None:
        """Yield to the other streams if more entries are ready."""
        if self.wake.is_set():
            await asyncio.sleep(0)

    def leave(self, delivered_ms: int | None = None, grace_ms: int = 0) -> None:
        """Stop following all members, as `Follower.leave`. Returns at once."""
        self._disarm()
        for feed in self.members:
            self._follower.leave(feed, delivered_ms, grace_ms)

    def _ring(self) -> None:
        self._alarm = None
        self.wake.set()

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
