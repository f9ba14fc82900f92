"""Follows requests in Redis for all clients of this process: live over pub/sub, everything else from the token logs.

Pub/sub delivers at most once, so nothing here depends on it: after a gap, a reconnect or half a second of silence the
log is read from the last entry on, for all silent requests in one pipelined call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from typing import Any

import structlog
from redis.exceptions import RedisError

from api.feed import BUFFER_ENTRIES, Feed
from api.settings import ApiSettings
from control import keys, requests
from control.clients import AsyncRedis
from control.connection import Call, arun_all, read
from control.errors import RedisUnavailable, RequestNotFound
from control.messages import LogEntry, decode_event
from control.requests.claim import decode_entry

log = structlog.stdlib.get_logger(__name__)

_TICK = 0.1
_READ_ENTRIES = 2 * BUFFER_ENTRIES
_EVERY_STATE = 4
"""Of the reads that bring nothing, every fourth renews the follower's registration and reads the request's state."""


class Follower:
    """Owns the process's subscription and its feeds. Start it before the first request, stop it after the last."""

    def __init__(self, client: AsyncRedis, settings: ApiSettings) -> None:
        self._client = client
        self._api = settings.api_id
        self._silence = settings.silence
        self._pubsub = client.pubsub(ignore_subscribe_messages=False)
        self._subscribed: dict[str, asyncio.Event] = {}
        self._feeds: dict[tuple[str, str], list[Feed]] = defaultdict(list)
        self._hungry: set[Feed] = set()
        self._nudge = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        for loop in (self._listen(), self._sweep()):
            task = asyncio.create_task(loop)
            self._tasks.add(task)

    async def stop(self) -> None:
        """End the loops, and let what was begun for readers that left come to its end."""
        loops = [task for task in self._tasks if not task.done()]
        for task in loops:
            if task.get_name() != "leave":
                task.cancel()
        await asyncio.gather(*loops, return_exceptions=True)
        with contextlib.suppress(RedisError, OSError):
            await self._pubsub.aclose()

    async def subscribe(self, model: str) -> None:
        """Be sure that this process hears the model's events. Must come before a request is enqueued."""
        channel = keys.ModelKeys(model).events(self._api)
        confirmed = self._subscribed.get(channel)
        if confirmed is None:
            confirmed = self._subscribed[channel] = asyncio.Event()
            try:
                await self._pubsub.subscribe(channel)
            except (RedisError, OSError) as error:
                del self._subscribed[channel]
                raise RedisUnavailable(f"could not subscribe to the events of '{model}': {error}") from error
            self._nudge.set()
        # Without a confirmation the log still has everything, only later: go on.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(confirmed.wait(), 1.0)

    def open(self, model: str, rid: str, tenant: str, wake: asyncio.Event) -> Feed:
        """A feed from seq 1; live entries are kept from now on."""
        feed = Feed(model, rid, tenant, wake, asyncio.get_running_loop().time())
        feed.on_hungry(self._want)
        self._feeds[model, rid].append(feed)
        return feed

    def close(self, feed: Feed) -> bool:
        """Forget a feed; True if it was this process's last one for its request."""
        feeds = self._feeds.get((feed.model, feed.rid), [])
        if feed in feeds:
            feeds.remove(feed)
        self._hungry.discard(feed)
        if feeds:
            return False
        self._feeds.pop((feed.model, feed.rid), None)
        return True

    def leave(self, feed: Feed, delivered_ms: int | None) -> None:
        """Close a feed and tell Redis: the last follower's leaving applies the request's on_disconnect.

        Returns at once, so that it can be called while a cancelled handler unwinds.
        """
        if self.close(feed):
            task = asyncio.create_task(self._unfollow(feed, delivered_ms), name="leave")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @property
    def open_feeds(self) -> int:
        return sum(len(feeds) for feeds in self._feeds.values())

    async def _unfollow(self, feed: Feed, delivered_ms: int | None) -> None:
        call = requests.unfollow(feed.model, feed.rid, self._api, delivered_ms)
        try:
            await arun_all(self._client, [call])
        except RedisUnavailable as error:
            # The orphan policy applies on_disconnect once this api's heartbeat has lapsed.
            log.warning("could not unfollow", action="unfollow", rid=feed.rid, model=feed.model, error=str(error))

    # --- live ---------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            if not self._subscribed:
                self._nudge.clear()
                await self._nudge.wait()
                continue
            try:
                message: dict[str, Any] | None = await self._pubsub.get_message(timeout=1.0)  # type: ignore[assignment]
            except (RedisError, OSError) as error:
                log.warning("the event channel broke", action="resubscribe", error=str(error))
                await self._resubscribe()
                continue
            if message is not None:
                self._receive(message["type"], message["channel"], message["data"])

    def _receive(self, kind: str, channel: str, data: str) -> None:
        if kind == "subscribe":
            if channel in self._subscribed:
                self._subscribed[channel].set()
            return
        if kind != "message":
            return
        now = asyncio.get_running_loop().time()
        model = channel.removeprefix(keys.PREFIX + "{").partition("}:")[0]
        for row in decode_event(data):
            for feed in self._feeds.get((model, row.rid), ()):
                feed.offer(row.entries, now)

    async def _resubscribe(self) -> None:
        """Come back to every channel, for as long as it takes; what was missed is in the logs."""
        wait = 0.05
        while True:
            try:
                await self._pubsub.aclose()
                await self._pubsub.subscribe(*self._subscribed)
                break
            except (RedisError, OSError):
                await asyncio.sleep(wait)
                wait = min(1.0, wait * 2)
        for feeds in self._feeds.values():
            for feed in feeds:
                self._want(feed)

    # --- from the log -------------------------------------------------------------------------------------------------

    def _want(self, feed: Feed) -> None:
        self._hungry.add(feed)
        self._nudge.set()

    async def _sweep(self) -> None:
        """Read the logs of all feeds that know of a gap or have heard nothing for a while."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._nudge.wait(), _TICK)
            self._nudge.clear()
            now = loop.time()
            due = set(self._hungry)
            self._hungry.clear()
            for feeds in self._feeds.values():
                due.update(feed for feed in feeds if feed.waiting and now - feed.heard_at >= self._patience(feed))
            if not due:
                continue
            try:
                await self._read(due, now)
            except (RedisUnavailable, RedisError, OSError) as error:
                log.warning("could not read token logs", action="follow", feeds=len(due), error=str(error))
                self._hungry |= due
                await asyncio.sleep(self._silence)

    async def _read(self, due: set[Feed], now: float) -> None:
        by_model: dict[str, list[Feed]] = defaultdict(list)
        for feed in due:
            feed.heard_at = now
            by_model[feed.model].append(feed)
        for model, feeds in by_model.items():
            await self.refresh([feed for feed in feeds if feed.quiet_reads % _EVERY_STATE == 0])
            light: dict[str, list[Feed]] = defaultdict(list)
            for feed in feeds:
                if feed.quiet_reads % _EVERY_STATE:
                    light[feed.rid].append(feed)
            calls = [_read_log(model, rid, min(feed.have for feed in same)) for rid, same in light.items()]
            for same, entries in zip(light.values(), _all(await arun_all(self._client, calls)), strict=True):
                for feed in same:
                    feed.quiet_reads += 1
                    feed.offer(entries, now, more=len(entries) == _READ_ENTRIES)
            await self._tell_positions(model, feeds)

    def _patience(self, feed: Feed) -> float:
        """Seconds without news after which a log is read; longer for a request that waits in the queue."""
        return self._silence * (min(4, 1 + feed.quiet_reads) if feed.fields.get("state") == "queued" else 1)

    async def _tell_positions(self, model: str, feeds: list[Feed]) -> None:
        queued = [feed for feed in feeds if feed.fields.get("state") == "queued"]
        if not queued:
            return
        calls = [requests.position(model, feed.rid) for feed in queued]
        for feed, position in zip(queued, _all(await arun_all(self._client, calls)), strict=True):
            if position is None:
                feed.fields = {**feed.fields, "state": "running"}
            feed.position = position
            feed.wake.set()

    async def refresh(self, feeds: list[Feed]) -> None:
        """Register as follower, read state and the log's rest; a request that is gone fails its feed."""
        if not feeds:
            return
        calls = [requests.follow(feed.model, feed.rid, self._api, feed.tenant, feed.have) for feed in feeds]
        now = asyncio.get_running_loop().time()
        for feed, followed in zip(feeds, await arun_all(self._client, calls), strict=True):
            if isinstance(followed, RequestNotFound):
                feed.fail(followed)
            elif isinstance(followed, Exception):
                raise followed
            else:
                feed.quiet_reads += 1
                feed.fields = followed.fields
                feed.offer(followed.entries, now)
                feed.wake.set()


def _read_log(model: str, rid: str, have: int) -> Call[list[LogEntry]]:
    """As requests.read_log, but never more than a reader can soon take."""

    def parse(reply: list[tuple[str, dict[str, str]]] | None) -> list[LogEntry]:
        return [decode_entry(fields["e"]) for _, fields in reply or []]

    start = f"{have + 1}-0"
    return read("XRANGE", keys.ModelKeys(model).log(rid), start, "+", "COUNT", _READ_ENTRIES, parse=parse)


def _all(outcomes: list[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes
