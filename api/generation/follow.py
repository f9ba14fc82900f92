"""Follows requests in Redis for all clients of this process: live over pub/sub, everything else from the token logs.

A `Feed` delivers the log of one request to one reader; `Feeds` are the feeds of one answer. `Follower` owns all feeds
of the process. After a gap, a break of the channel or half a second of silence it reads the log from the last entry
on, for all silent requests in pipelined calls. Its parts stand below it: `QueuedFeeds` reads the places of requests
that only wait in the queue, `EventChannel` receives what leaders publish, `Recovery` restores what Redis has lost of a
request, and `UnfollowQueue` tells Redis which readers have left.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from itertools import chain, islice
from math import ceil
from typing import Any

import msgspec
import structlog
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from api.http.tasks import PeriodicTask, end
from api.settings import ApiSettings
from control import keys, requests
from control.backoff import doubling, pause_after
from control.clock import now_ms
from control.constants import PLACES
from control.errors import LogConflict, RedisUnavailable, RequestNotFound
from control.messages import EventRow, LogEntry, decode_event, decode_request
from control.redis.clients import AsyncRedis
from control.redis.connection import Batches, Call, Steps, arun, arun_every, arun_steps
from control.redis.outage import outage
from control.requests import Enqueue, Enqueued, Followed, QueuePlace, enqueue_again, repair
from control.requests.token_log import TokenLog

log = structlog.stdlib.get_logger(__name__)

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Enqueue).decode

BUFFER_ENTRIES = 256
"""Entries that wait for a reader that is slower than the model; whatever comes after is read from the log later."""


class Feed:
    """Delivers a request's log entries from seq 1, in order, each once.

    Entries arrive from the live channel and from reads of the log, in any mixture and with repeats. An entry that does
    not continue the log is dropped and read again. Entries that were handed out are kept, packed, until the reader is
    done: after a failover they may be the only copy.
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
        """QueuePlace in the model's queue, from 1; None when it is not known."""
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
        """All entries that were handed out or are ready, from seq 1. Those that Redis lacks are written back to it."""
        self.diverged = False
        """True after entries that contradict the feed. It takes no more until the log has been repaired."""
        self.missing_since: float | None = None
        """Loop time at which Redis first did not know the request."""
        self._taken_seq = 0
        self._newest_seq = 0
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
        return self._newest_seq > self.have

    @property
    def waiting(self) -> bool:
        """True if the reader has taken every entry."""
        return self._taken_seq == self.have

    @property
    def ended_without_token(self) -> bool:
        """True if the first entry ends its choice with no token: refused by the leader, cancelled or expired."""
        return (
            self._taken_seq == 0
            and bool(self.entries)
            and self.entries[0].token is None
            and bool(self.entries[0].finish)
        )

    def offer(
        self, entries: Sequence[LogEntry], now: float, more: bool = False, rest: bool = False, whole: bool = False
    ) -> None:
        """Take entries in ascending order of seq, skipping what was seen before.

        `more`: the log goes on after them. `rest`: they are all that the log has from here on. `whole`: take them all,
        however far behind the reader is, because they can be read only now.
        """
        have = self.have
        self.heard_at = now
        most = have + len(entries) if whole else BUFFER_ENTRIES
        if rest and (not entries or entries[-1].seq <= have):
            self._newest_seq = have  # what was announced beyond is not there (any more): it will be announced again
        if more:
            self._newest_seq = max(self._newest_seq, entries[-1].seq + 1)
        for entry in entries:
            seq = entry.seq
            if seq > self._newest_seq:
                self._newest_seq = seq
            if seq <= have:
                self.diverged |= not same(entry, self.entries[seq - 1])
            elif seq == have + 1 and not self.diverged and have - self._taken_seq < most:
                self.entries.append(entry)
                have = seq
        if have > self._taken_seq:
            self.quiet_reads = 0
            self.on_entries()
        if self.diverged or self._newest_seq > have:
            self._ask()

    def placed(self, place: QueuePlace, now: float) -> bool:
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
        self._newest_seq = self.have

    def take(self, most: int | None = None) -> list[LogEntry]:
        """The entries that are ready, at most so many: the reader is woken again for the rest. No entry is no end."""
        start = self._taken_seq
        have = self.have
        ready = have - start
        if most is None or ready <= most:
            entries = self.entries.since(start)
            self._taken_seq = have
        else:
            entries = self.entries[start : start + most]
            self._taken_seq = start + most
            self.wake.set()
        if entries and (self.diverged or self._newest_seq > have):
            self._ask()
        return entries

    def fail(self, error: Exception) -> None:
        self.error = error
        self.diverged = False
        self.wake.set()

    def _ask(self) -> None:
        if (self.diverged or (self.behind and self.waiting)) and self._on_hungry is not None:
            self._on_hungry(self)


def same(first: LogEntry, second: LogEntry) -> bool:
    """True if both entries are the same place of the same answer."""
    return (first.choice, first.token, first.finish) == (second.choice, second.token, second.finish)


_ALARMS_S = 0.05
"""Time between two moments at which alarms ring."""


class Feeds:
    """Follows the requests of one answer. `leave` must be called once the reader has all of it, or has left."""

    def __init__(self, follower: Follower, model: str, tenant: str, rid: str) -> None:
        self.model = model
        self.rid = rid
        self.members: list[Feed] = []
        self.wake = asyncio.Event()
        """Set by news of any member. The reader clears it before it looks at them."""
        self._follower = follower
        self.tenant = tenant
        self._write: Callable[[], object] | None = None
        """Writes entries while the reader waits; None while it looks at them itself."""
        self._written_soon = False
        self._alarm: asyncio.TimerHandle | None = None
        self._shown: int | None = None
        self._show_at = 0.0

    def open(self, rid: str) -> Feed:
        """Follow one more member from now on."""
        feed = self._follower.open(self.model, rid, self.tenant, self.wake)
        feed.on_entries = self._entries_came
        self.members.append(feed)
        return feed

    def replace_last(self, rid: str) -> Feed:
        """Follow `rid`, which was joined by its Idempotency-Key, in place of the last member."""
        self._release(self.members[-1])
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
        self._shown = self.position
        self._show_at = asyncio.get_running_loop().time() + every_s
        for feed in self.members:
            feed.shown = feed.position
            feed.show_at = self._show_at
        return self._shown

    @property
    def expected_wait_ms(self) -> int | None:
        """Time until the last member that still waits is expected to be claimed; None if that is unknown."""
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

    def _entries_came(self) -> None:
        if self._write is None:
            self.wake.set()
        elif not self._written_soon:
            self._written_soon = True
            self._follower.write_soon(self)

    def write_now(self) -> None:
        """Called by the follower, as `write_soon` asked: write what has come, or wake the reader, which has woken for
        something else."""
        self._written_soon = False
        if self._write is None:
            self.wake.set()
        else:
            self._write()

    async def wait(self, seconds: float, write: Callable[[], object] | None = None) -> None:
        """Wait for news, at most about so long, or less. Entries are no news where there is `write`, which is called
        for them: it takes them, or sets `wake`."""
        if self.wake.is_set():
            return
        loop = asyncio.get_running_loop()
        # Alarms of many streams ring together: each turn of the event loop has a price of its own.
        until = ceil((loop.time() + seconds) / _ALARMS_S) * _ALARMS_S
        # Most waits end with a token soon: an alarm that is set already is left as it is, and may wake for nothing.
        if self._alarm is None or self._alarm.when() > until:
            self._disarm()
            self._alarm = loop.call_at(until, self._ring)
        self._write = write
        try:
            await self.wake.wait()
        finally:
            self._write = None

    async def rest(self) -> None:
        """Yield to the other streams if more entries are ready."""
        if self.wake.is_set():
            await asyncio.sleep(0)

    def leave(self, delivered_ms: int | None = None, grace_ms: int = 0) -> None:
        """Stop following all members, as `Follower.leave`. Returns at once."""
        self._disarm()
        for feed in self.members:
            self._release(feed)
            self._follower.leave(feed, delivered_ms, grace_ms)

    def _release(self, feed: Feed) -> None:
        """End the cycle of references, or the memory of prompt and tokens waits for the garbage collector."""
        feed.on_entries = feed.wake.set

    def _ring(self) -> None:
        self._alarm = None
        self.wake.set()

    def _disarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


_TICK_S = 0.1
_READ_ENTRIES = 2 * BUFFER_ENTRIES
_READ_AT_ONCE = 64
"""Logs in one pipelined call: some milliseconds of the event loop."""
_WRITES_AT_ONCE = 128
"""Streams that are written in one turn of the event loop: some three milliseconds."""
_EVERY_STATE = 4
"""Of the reads that bring nothing, every fourth renews the follower's registration and reads the request's state."""


class Follower:
    """Owns the process's feeds. Start it before the first request, stop it after the last."""

    def __init__(self, client: AsyncRedis, batches: Batches, settings: ApiSettings) -> None:
        self._client = client
        self._batches = batches
        self._api = settings.api_id
        self._silence = settings.silence
        self._channel = EventChannel(client, settings.api_id, self._receive_event, self._missed)
        self._feeds: dict[tuple[str, str], list[Feed]] = defaultdict(list)
        self._recovery = Recovery(client, settings.api_id, settings.lost_wait, self._want)
        self._watched: set[Feed] = set()
        """The feeds that do not only wait in the queue: their logs are read after a silence."""
        self._hungry: set[Feed] = set()
        self._token_at: dict[str, float] = {}
        self._listening: asyncio.Task[None] | None = None
        self._to_write = deque[Feeds]()
        """Those whose entries are written in the next turn of the event loop."""
        self._task = PeriodicTask("follow", self._catch_up, self._until_next, retry_s=settings.silence)
        self._queued = QueuedFeeds(client, settings.api_id, settings.silence, self.refresh)
        self._unfollows = UnfollowQueue(batches, settings.api_id)
        self.subscribe = self._channel.subscribe

    def start(self) -> None:
        self._listening = asyncio.create_task(self._channel.listen())
        self._task.start()
        self._queued.start()

    async def stop(self) -> None:
        """End the loops, and let what was begun for readers that left come to its end."""
        if self._listening is not None:
            await end(self._listening)
        await self._task.stop()
        await self._queued.stop()
        await self._unfollows.stop()
        await self._channel.close()

    def open(self, model: str, rid: str, tenant: str, wake: asyncio.Event) -> Feed:
        """A feed from seq 1; live entries are kept from now on. The log is read once the feed has begun."""
        feed = Feed(model, rid, tenant, wake, asyncio.get_running_loop().time())
        feed.on_hungry(self._want)
        self._feeds[model, rid].append(feed)
        self._queued.add(feed)
        return feed

    def wake_all(self) -> None:
        """Have every reader look up, whatever it waits for."""
        for feeds in self._feeds.values():
            for feed in feeds:
                feed.wake.set()

    def close(self, feed: Feed) -> bool:
        """Forget a feed; True if it was this process's last one for its request."""
        feeds = self._feeds.get((feed.model, feed.rid), [])
        if feed in feeds:
            feeds.remove(feed)
        self._hungry.discard(feed)
        self._watched.discard(feed)
        if feed.queued:
            self._queued.remove(feed)
        if feeds:
            return False
        self._feeds.pop((feed.model, feed.rid), None)
        return True

    def leave(self, feed: Feed, delivered_ms: int | None, grace_ms: int = 0) -> None:
        """Close a feed and tell Redis, which applies on_disconnect when the last follower leaves. Returns at once.

        `grace_ms`: the least time that the client gets to come back, where it was this process that left.
        """
        if self.close(feed):
            self._unfollows.add(feed, delivered_ms, grace_ms)

    @property
    def open_feeds(self) -> int:
        return sum(len(feeds) for feeds in self._feeds.values())

    def last_token(self, model: str) -> float:
        """Monotonic time at which this process last received a token of the model; 0 if never."""
        return self._token_at.get(model, 0.0)

    def _receive_event(self, model: str, rows: list[EventRow]) -> None:
        now = asyncio.get_running_loop().time()
        if any(entry.token is not None or entry.prompt for row in rows for entry in row.entries):
            self._token_at[model] = time.monotonic()
        for row in rows:
            for feed in self._feeds.get((model, row.rid), ()):
                feed.offer(row.entries, now)
                if feed.queued:
                    self._sort(feed)

    def write_soon(self, feeds: Feeds) -> None:
        """Have `feeds` write what it has, after the messages that are here already have been heard."""
        if not self._to_write:
            asyncio.get_running_loop().call_soon(self._write)
        self._to_write.append(feeds)

    def _write(self) -> None:
        for _ in range(min(_WRITES_AT_ONCE, len(self._to_write))):
            self._to_write.popleft().write_now()
        if self._to_write:
            asyncio.get_running_loop().call_soon(self._write)

    def _missed(self) -> None:
        for feeds in self._feeds.values():
            for feed in feeds:
                if feed.queued:
                    self._queued.hasten(feed)
                else:
                    self._want(feed)

    def _sort(self, feed: Feed) -> None:
        """Have a feed looked after as what it is now: a request that only waits in the queue, or one with a log."""
        waits = feed.fields.get("state", "queued") == "queued" and not feed.have and not feed.behind
        if waits == feed.queued or feed not in self._feeds.get((feed.model, feed.rid), ()):
            return
        if waits:
            self._watched.discard(feed)
            self._queued.add(feed)
        else:
            self._queued.remove(feed)
            if not self._watched:
                self._task.wake()
            self._watched.add(feed)

    def _want(self, feed: Feed) -> None:
        self._hungry.add(feed)
        self._task.wake()

    async def _catch_up(self) -> None:
        """Read the logs of all feeds with a gap or without an event for a while."""
        due = self._due(asyncio.get_running_loop().time())
        if not due:
            return
        try:
            await self._read(due)
        except Exception as error:
            self._hungry |= {feed for feed in due if feed in self._feeds.get((feed.model, feed.rid), ())}
            if isinstance(error, RedisUnavailable):
                outage.waits("follow", error)
            raise
        outage.goes_on("follow")

    def _until_next(self) -> float:
        """Seconds until the next look at the feeds; the first one that is to be watched ends a long pause."""
        return _TICK_S if self._watched else _REST_S

    def _due(self, now: float) -> set[Feed]:
        due = {feed for feed in self._hungry if feed.error is None}
        self._hungry.clear()
        due.update(feed for feed in self._watched if feed.waiting and now - feed.heard_at >= self._patience(feed))
        # A request that is not enqueued yet is not missing.
        return {feed for feed in due if feed.begun}

    def _patience(self, feed: Feed) -> float:
        """Seconds without news after which a log is read; longer for a request that waits in the queue."""
        return self._silence * (min(4, 1 + feed.quiet_reads) if feed.fields.get("state") == "queued" else 1)

    async def _read(self, due: set[Feed]) -> None:
        by_model: dict[str, list[Feed]] = defaultdict(list)
        for feed in due:
            by_model[feed.model].append(feed)
        away: RedisUnavailable | None = None
        for model, feeds in by_model.items():
            try:
                await self._read_model(model, feeds)
            except RedisUnavailable as error:
                away = error  # its shard of a Cluster perhaps: the other models' requests are not to wait for it
        if away is not None:
            raise away

    async def _read_model(self, model: str, feeds: list[Feed]) -> None:
        with_state = list[Feed]()
        log_only = list[Feed]()
        for feed in feeds:
            stale = feed.diverged or feed.quiet_reads % _EVERY_STATE == 0
            (with_state if stale else log_only).append(feed)
        for start in range(0, len(with_state), _READ_AT_ONCE):
            await self.refresh(with_state[start : start + _READ_AT_ONCE])
        for start in range(0, len(log_only), _READ_AT_ONCE):
            await self._read_logs(model, log_only[start : start + _READ_AT_ONCE])

    async def meet(self, feeds: list[Feed]) -> None:
        """Take up requests that other processes began, with their origins. Raises RequestNotFound, RedisUnavailable."""
        unmet = feeds
        while True:
            await self.refresh(unmet)
            for feed in feeds:
                if feed.error is not None:
                    raise feed.error
            unmet = [feed for feed in feeds if not feed.fields]
            if not unmet:
                return
            await asyncio.sleep(_TICK_S)  # lost since it was joined: another process may bring it back

    async def refresh(self, feeds: list[Feed]) -> None:
        """Register as follower of one model's requests, read state and the log's rest; what is gone is brought back."""
        counts = [feed.have for feed in feeds]
        calls = [
            requests.follow(
                feed.model, feed.rid, self._api, feed.tenant, feed.have, params=not feed.recoverable, most=_READ_ENTRIES
            )
            for feed in feeds
        ]
        outcomes = await self._batches.run_all(feeds[0].model, calls) if calls else []
        now = asyncio.get_running_loop().time()
        for feed, before, followed in zip(feeds, counts, outcomes, strict=True):
            if isinstance(followed, RequestNotFound):
                await self._recovery.restore(feed, followed, now)
            elif isinstance(followed, Exception):
                raise followed
            else:
                feed.missing_since = None
                feed.quiet_reads += 1
                feed.fields = followed.fields
                if feed.fields.get("state") != "queued":
                    feed.position = None
                feed.claim_at = None if followed.expected_wait_s is None else now + followed.expected_wait_s
                if not feed.recoverable:
                    feed.begin(origin_of(feed, followed, self._api, now_ms()))
                more = followed.more
                whole = not feed.recoverable
                feed.offer(followed.entries, now, more=more, rest=not more, whole=whole)
                self._sort(feed)
                if more and whole:
                    await self._take_rest(feed, followed.entries[-1].seq)
                if set_back(feed, followed, before):
                    await self._recovery.give_back(feed)
                feed.wake.set()

    async def _take_rest(self, feed: Feed, have: int) -> None:
        """Read a log to its end, page by page: a request that has ended has no prompt, and can't be computed again."""
        async for page in requests.aread_pages(self._client, feed.model, feed.rid, have):
            feed.offer(page, asyncio.get_running_loop().time(), rest=len(page) < requests.PAGE_ENTRIES, whole=True)

    async def _read_logs(self, model: str, feeds: list[Feed]) -> None:
        counts = [feed.have for feed in feeds]
        entries = await arun_every(self._client, [_read_log(model, feed.rid, feed.have) for feed in feeds])
        now = asyncio.get_running_loop().time()
        lost: list[Feed] = []
        for feed, before, page in zip(feeds, counts, entries, strict=True):
            feed.quiet_reads += 1
            more = len(page) == _READ_ENTRIES
            if before and (not page or page[0].seq != before):
                lost.append(feed)  # the last entry that it was given is not there any more
            else:
                feed.offer(page, now, more=more, rest=not more)
        await self.refresh(lost)


def _read_log(model: str, rid: str, have: int) -> Call[list[LogEntry]]:
    """The entries from seq `have` on, that one included, but never more than a reader can soon take."""
    return requests.read_log(model, rid, max(1, have) - 1, _READ_ENTRIES)


_QUEUED_TICK_S = 0.25
_REST_S = 60.0
_LONGEST_PATIENCE = 10
"""In times of `silence`, between two looks at a request that goes on waiting."""
_LOOKS_A_TICK = 4 * PLACES
"""Waiting requests that are looked at in a tick. With more of them the time between two looks at each grows."""
_AT_ONCE = 32
"""Requests that are read one by one, or readers that are woken, in one turn of the event loop: two milliseconds."""


class QueuedFeeds:
    """The feeds of requests that wait in the queue with an empty log, and the task that looks at them.

    Such a request has nothing to read but its place in the queue. The script `places` returns the places of up to
    PLACES requests, and which ones wait no longer (claimed, ended, lost, not followed): only these are read one by one.
    Each feed is in the slot of the tick of its next look, so that a tick touches no other feed.
    """

    def __init__(
        self, client: AsyncRedis, api_id: str, silence: float, read: Callable[[list[Feed]], Awaitable[None]]
    ) -> None:
        """`silence`: seconds until the second look; each later pause is longer, up to ten times of it. `read` takes
        feeds of one model that do not only wait; it raises RedisUnavailable."""
        self._client = client
        self._api_id = api_id
        self._silence = silence
        self._read = read
        self._slots: dict[int, dict[Feed, None]] = {}
        self._task = PeriodicTask("queued", self._look, self._until_next, retry_s=silence)
        self.start = self._task.start
        self.stop = self._task.stop

    def add(self, feed: Feed) -> None:
        """Look at it with the next tick, and again from time to time, until it is removed."""
        feed.queued = True
        if not self._slots:
            self._task.wake()
        self._put(feed, 0.0)

    def remove(self, feed: Feed) -> None:
        feed.queued = False
        self._take(feed)

    def hasten(self, feed: Feed) -> None:
        """Look at it with the next tick: something may have been missed."""
        self._take(feed)
        self._put(feed, 0.0)

    def _put(self, feed: Feed, look_at: float) -> None:
        feed.slot = int(look_at / _QUEUED_TICK_S)
        self._slots.setdefault(feed.slot, {})[feed] = None

    def _take(self, feed: Feed) -> None:
        slot = self._slots.get(feed.slot, {})
        slot.pop(feed, None)
        if not slot:
            self._slots.pop(feed.slot, None)

    def _until_next(self) -> float:
        return _QUEUED_TICK_S if self._slots else _REST_S

    async def _look(self) -> None:
        """Look at the feeds whose time has come, those first that wait for it longest."""
        now = asyncio.get_running_loop().time()
        by_model: dict[str, list[Feed]] = defaultdict(list)
        for feed in self._due(now):
            self._take(feed)
            if feed.begun and feed.error is None:
                by_model[feed.model].append(feed)
            else:
                self._put(feed, now + _QUEUED_TICK_S)
        try:
            await self._look_at_each(by_model)
        finally:
            now = asyncio.get_running_loop().time()
            for feed in chain.from_iterable(by_model.values()):
                if feed.queued and feed not in self._slots.get(feed.slot, ()):
                    self._put(feed, now + self._silence * min(_LONGEST_PATIENCE, feed.looks))

    async def _look_at_each(self, by_model: dict[str, list[Feed]]) -> None:
        away: RedisUnavailable | None = None
        for model, feeds in by_model.items():
            try:
                for start in range(0, len(feeds), PLACES):
                    await self._look_at(model, feeds[start : start + PLACES])
            except RedisUnavailable as error:
                away = error  # one shard of a Cluster perhaps: the other models are looked at
        if away is not None:
            outage.waits("queued", away)
            raise away
        outage.goes_on("queued")

    def _due(self, now: float) -> list[Feed]:
        slots = sorted(slot for slot in self._slots if slot <= now / _QUEUED_TICK_S)
        return list(islice(chain.from_iterable(self._slots[slot] for slot in slots), _LOOKS_A_TICK))

    async def _look_at(self, model: str, feeds: list[Feed]) -> None:
        # Of a request that another process began nothing is known yet.
        waiting = [feed for feed in feeds if feed.recoverable or feed.fields]
        places: list[QueuePlace | None] = []
        if waiting:
            places = await arun(self._client, requests.places(model, self._api_id, [feed.rid for feed in waiting]))
        others = [feed for feed in feeds if not (feed.recoverable or feed.fields)]
        woken = 0
        now = asyncio.get_running_loop().time()
        for feed, place in zip(waiting, places, strict=True):
            if place is None:
                others.append(feed)
                continue
            feed.looks += 1
            if feed.queued and feed.placed(place, now):
                woken += 1
                if woken % _AT_ONCE == 0:
                    await asyncio.sleep(0)
        for feed in others:
            feed.looks = 1  # the next look is soon, whatever becomes of this one
        for start in range(0, len(others), _AT_ONCE):
            await self._read([feed for feed in others[start : start + _AT_ONCE] if feed.queued])


_CONFIRM_S = 1.0
_PATIENCE_S = 1.0
"""After so long without a message the server is asked whether it is there, and has as long to answer."""
_RESUBSCRIBE_S = doubling(0.05, 1.0)
"""Pauses between tries to come back to the channels."""


class EventChannel:
    """Hears what leaders publish for this API process. Delivery is at most once: nothing may depend on it."""

    def __init__(
        self,
        client: AsyncRedis,
        api_id: str,
        on_event: Callable[[str, list[EventRow]], None],
        on_break: Callable[[], None],
    ) -> None:
        """`on_event(model, rows)` for each event, `on_break()` whenever events may have been missed."""
        self._client = client
        self._pubsub = client.pubsub()
        self._api_id = api_id
        self._on_event = on_event
        self._on_break = on_break
        self._confirmed: dict[str, asyncio.Event] = {}
        self._subscribed = asyncio.Event()

    async def subscribe(self, model: str) -> None:
        """Subscribe to the model's events, before a request is enqueued."""
        channel = keys.ModelKeys(model).events(self._api_id)
        confirmed = self._confirmed.get(channel)
        if confirmed is None:
            confirmed = self._confirmed[channel] = asyncio.Event()
            try:
                await self._pubsub.subscribe(channel)
            except (RedisError, OSError) as error:
                self._confirmed.pop(channel, None)
                raise RedisUnavailable(f"could not subscribe to the events of '{model}': {error}") from error
            self._subscribed.set()
        if confirmed.is_set():
            return
        # Without a confirmation the log still has everything, only later: go on.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CONFIRM_S):
                await confirmed.wait()

    async def listen(self) -> None:
        """Hear until cancelled."""
        await self._subscribed.wait()
        while True:
            try:
                await self._hear()
                outage.goes_on("events")
            except (RedisError, OSError) as error:
                outage.waits("events", error)
                await self._resubscribe()

    async def _hear(self) -> None:
        """One message, or a proof that silence is not a connection that leads nowhere, which resets nothing."""
        message = await self._message()
        if message is None:
            await self._pubsub.ping()
            message = await self._message()
            if message is None:
                raise RedisConnectionError("the event channel does not answer")
        self._receive(message["type"], message["channel"], message["data"])

    async def _message(self) -> dict[str, Any] | None:
        return await self._pubsub.get_message(timeout=_PATIENCE_S)  # type: ignore[return-value]

    async def close(self) -> None:
        with contextlib.suppress(RedisError, OSError):
            await self._pubsub.aclose()

    def _receive(self, kind: str, channel: str, data: str) -> None:
        if kind == "subscribe":
            if channel in self._confirmed:
                self._confirmed[channel].set()
        elif kind == "message":
            model = channel.removeprefix(f"{keys.PREFIX}{{").partition("}:")[0]
            try:
                rows = decode_event(data)
            except msgspec.DecodeError as error:
                # Whatever it was meant to say is in the log.
                log.error("an event could not be read", action="bad_event", model=model, error=str(error))
                return
            self._on_event(model, rows)

    async def _resubscribe(self) -> None:
        """Come back to every channel, for as long as it takes; what was missed is in the logs."""
        failures = 0
        while True:
            try:
                await self._pubsub.aclose()
                self._pubsub = self._client.pubsub()  # of a Cluster: another node's
                await self._pubsub.subscribe(*self._confirmed)
                break
            except (RedisError, OSError):
                failures += 1
                await asyncio.sleep(pause_after(failures, _RESUBSCRIBE_S))
        self._on_break()


def bring_back(feed: Feed, now_ms: int) -> Steps[Enqueued] | None:
    """Enqueue the request again under its id, seed and delivered prefix; None if its parameters are unknown."""
    origin = feed.origin
    if origin is None:
        return None
    deadline_ms = origin.deadline_ms
    if deadline_ms:
        # At least a millisecond: a request whose time has passed ends as expired, by the same rules as any other.
        deadline_ms = max(1, deadline_ms - (now_ms - origin.received_ms))
    return enqueue_again(msgspec.structs.replace(origin, deadline_ms=deadline_ms, lost=True), feed.entries)


def origin_of(feed: Feed, followed: Followed, api: str, now_ms: int) -> Enqueue | None:
    """The request as it was enqueued first, as `api` would enqueue it; None for one that has ended, and for one with
    images, whose pixels only the process has that enqueued it.

    Its deadline counts as `bring_back` reads it: from the moment of receipt on the other process's clock, and by this
    one's clock. The time left is known by the server's clock, so clocks that differ do no harm.
    """
    if not followed.params:
        return None
    params = decode_request(followed.params)
    if params.images:
        return None
    fields = followed.fields
    received_ms = int(fields["t_received"])
    left_ms = int(fields["deadline"]) - followed.server_ms
    return Enqueue(
        rid=feed.rid,
        model=feed.model,
        params=params,
        tenant=feed.tenant,
        account=fields.get("account", ""),
        hold=fields.get("hold", ""),
        priority=fields["priority"],
        deadline_ms=(left_ms + now_ms - received_ms) or 1,  # 0 would mean none
        on_disconnect=fields["on_disconnect"],
        api=api,
        idempotency_key=fields["idempotency"],
        body_hash=fields["body_hash"],
        view=fields["view"],
        received_ms=received_ms,
        keep_ms=int(fields.get("keep", "0")),
    )


def set_back(feed: Feed, followed: Followed, last_seq: int) -> bool:
    """True if Redis lacks entries up to `last_seq`, which this process had when it asked, or has others."""
    return feed.diverged or int(followed.fields["seq"]) < last_seq


class Recovery:
    """Restores requests and logs that Redis has lost from what the feeds of this process hold."""

    def __init__(self, client: AsyncRedis, api: str, lost_wait: float, read_again: Callable[[Feed], None]) -> None:
        """`lost_wait`: seconds for which another process is given the time to bring back what this one can't."""
        self._client = client
        self._api = api
        self._lost_wait = lost_wait
        self._read_again = read_again

    async def restore(self, feed: Feed, error: RequestNotFound, now: float) -> None:
        """Redis does not know the request: bring it back. A request that this process never met fails with `error`."""
        feed.heard_at = now
        if not feed.begun:
            feed.fail(error)  # it never was, or is another tenant's
            return
        feed.missing_since = feed.missing_since or now
        steps = bring_back(feed, now_ms())
        if steps is not None:
            await arun_steps(self._client, steps)
            log.warning("brought a lost request back", action="bring_back", rid=feed.rid, delivered=feed.have)
            # Ends it where its end was delivered, and tells where another process had brought it back.
            await self.give_back(feed)
        elif feed.complete:
            feed.missing_since = None  # all that the reader still lacks is here
        elif now - feed.missing_since > self._lost_wait:
            feed.fail(error)

    async def give_back(self, feed: Feed) -> None:
        """Redis has lost entries that this process was given: they are written back before anything else is read."""
        try:
            repaired = await arun_steps(
                self._client, repair(feed.model, feed.rid, self._api, feed.tenant, feed.entries)
            )
        except LogConflict as error:
            feed.fail(error)
            return
        except RequestNotFound:
            return  # gone since: the next look brings it back
        feed.repaired()
        self._read_again(feed)
        if repaired != "same":
            log.warning("gave a token log back", action="repair", rid=feed.rid, seq=feed.have, outcome=repaired)


_LAST_S = 5.0
"""Time given at the stop to calls under way. The orphan reaper of another process does what they leave."""
_LINGER_S = 0.005
"""Calls about delivered answers only record a time: they wait for others to share a batch."""


class UnfollowQueue:
    """Sends a call at once where its request may go on, a few milliseconds later where the client has the answer."""

    def __init__(self, batches: Batches, api_id: str) -> None:
        self._batches = batches
        self._api = api_id
        self._delivered: dict[str, dict[str, Call[None]]] = defaultdict(dict)
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    def add(self, feed: Feed, delivered_ms: int | None, grace_ms: int) -> None:
        """Returns at once, so that it can be called while a cancelled handler unwinds."""
        call = requests.unfollow(feed.model, feed.rid, self._api, delivered_ms, grace_ms)
        if delivered_ms is None:
            # In the model's own lane, so that a later follow of the same request comes after it.
            self._begin(self._send(feed.model, {feed.rid: call}))
            return
        self._delivered[feed.model][feed.rid] = call
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self._send_delivered)

    async def stop(self) -> None:
        """Send what is queued, and wait for the calls under way."""
        self._send_delivered()
        if self._sending:
            await asyncio.wait(self._sending, timeout=_LAST_S)

    def _send_delivered(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for model, calls in self._delivered.items():
            self._begin(self._send(f"{model} delivered", calls))
        self._delivered = defaultdict(dict)

    def _begin(self, sending: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(sending)
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, lane: str, calls: dict[str, Call[None]]) -> None:
        for rid, outcome in zip(calls, await self._batches.run_all(lane, list(calls.values())), strict=True):
            if isinstance(outcome, RedisUnavailable):
                # Once the heartbeat of this process has lapsed, an orphan reaper applies on_disconnect.
                log.warning("could not unfollow", action="unfollow", rid=rid, lane=lane, error=str(outcome))
            elif isinstance(outcome, Exception):
                raise outcome
