"""Follows requests in Redis for all clients of this process: live over pub/sub, everything else from the token logs.

After a gap, a break of the channel or half a second of silence the log is read from the last entry on, for all silent
requests in pipelined calls. Requests that only wait in the queue are looked at together (queued.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

import structlog

from api.asgi.tasks import PeriodicTask, end
from api.follow.channel import EventChannel
from api.follow.feed import BUFFER_ENTRIES, Feed
from api.follow.queued import QueuedFeeds
from api.follow.recovery import Recovery, origin_of, set_back
from api.follow.unfollow import UnfollowQueue
from api.settings import ApiSettings
from control import requests
from control.clock import now_ms
from control.errors import RedisUnavailable, RequestNotFound
from control.messages import EventRow, LogEntry
from control.redis.batches import Batches
from control.redis.clients import AsyncRedis
from control.redis.connection import Call, arun_every
from control.redis.outage import outage

log = structlog.stdlib.get_logger(__name__)

_TICK_S = 0.1
_REST_S = 60.0
_READ_ENTRIES = 2 * BUFFER_ENTRIES
_READ_AT_ONCE = 64
"""Logs in one pipelined call: some milliseconds of the event loop."""
_EVERY_STATE = 4
"""Of the reads that bring nothing, every fourth renews the follower's registration and reads the request's state."""


class Follower:
    """Owns the process's feeds. Start it before the first request, stop it after the last."""

    def __init__(self, client: AsyncRedis, batches: Batches, settings: ApiSettings) -> None:
        self._client, self._batches = client, batches
        self._api = settings.api_id
        self._silence = settings.silence
        self._channel = EventChannel(client, settings.api_id, self._heard, self._missed)
        self._feeds: dict[tuple[str, str], list[Feed]] = defaultdict(list)
        self._recovery = Recovery(client, settings.api_id, settings.lost_wait, self._want)
        self._watched: set[Feed] = set()
        """The feeds that do not only wait in the queue: their logs are read after a silence."""
        self._hungry: set[Feed] = set()
        self._token_at: dict[str, float] = {}
        self._listening: asyncio.Task[None] | None = None
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

    # --- live ---

    def last_token(self, model: str) -> float:
        """Monotonic time at which this process last heard of a token of the model; 0 if never."""
        return self._token_at.get(model, 0.0)

    def _heard(self, model: str, rows: list[EventRow]) -> None:
        now = asyncio.get_running_loop().time()
        if any(entry.token is not None or entry.prompt for row in rows for entry in row.entries):
            self._token_at[model] = time.monotonic()
        for row in rows:
            for feed in self._feeds.get((model, row.rid), ()):
                feed.offer(row.entries, now)
                if feed.queued:
                    self._sort(feed)

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

    # --- from the log ---

    def _want(self, feed: Feed) -> None:
        self._hungry.add(feed)
        self._task.wake()

    async def _catch_up(self) -> None:
        """Read the logs of all feeds that know of a gap or have heard nothing for a while."""
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
        with_state, log_only = list[Feed](), list[Feed]()
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
        had = [feed.have for feed in feeds]
        calls = [
            requests.follow(
                feed.model, feed.rid, self._api, feed.tenant, feed.have, params=not feed.recoverable, most=_READ_ENTRIES
            )
            for feed in feeds
        ]
        outcomes = await self._batches.run_all(feeds[0].model, calls) if calls else []
        now = asyncio.get_running_loop().time()
        for feed, before, followed in zip(feeds, had, outcomes, strict=True):
            if isinstance(followed, RequestNotFound):
                await self._recovery.gone(feed, followed, now)
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
                more, whole = followed.more, not feed.recoverable
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
        had = [feed.have for feed in feeds]
        entries = await arun_every(self._client, [_read_log(model, feed.rid, feed.have) for feed in feeds])
        now = asyncio.get_running_loop().time()
        lost: list[Feed] = []
        for feed, before, found in zip(feeds, had, entries, strict=True):
            feed.quiet_reads += 1
            more = len(found) == _READ_ENTRIES
            if before and (not found or found[0].seq != before):
                lost.append(feed)  # the last entry that it was given is not there any more
            else:
                feed.offer(found, now, more=more, rest=not more)
        await self.refresh(lost)


def _read_log(model: str, rid: str, have: int) -> Call[list[LogEntry]]:
    """The entries from seq `have` on, that one included, but never more than a reader can soon take."""
    return requests.read_log(model, rid, max(1, have) - 1, _READ_ENTRIES)
