"""Follows requests that only wait in the queue: many in one call, because almost always only their places change.

A request whose log is empty, that is queued and has this process as a follower, has nothing to read but its place. The
script `places` tells the places of up to PLACES such requests, and which ones are no longer of that kind (claimed,
begun, ended, lost, not followed): only those are read one by one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from itertools import chain, islice

from api.asgi.tasks import PeriodicTask
from api.follow.feed import Feed
from control import requests
from control.constants import PLACES
from control.errors import RedisUnavailable
from control.redis.clients import AsyncRedis
from control.redis.connection import arun
from control.redis.outage import outage
from control.requests import Place

_TICK_S = 0.25
_REST_S = 60.0
_LONGEST_PATIENCE = 10
"""In times of `silence`, between two looks at a request that goes on waiting."""
_LOOKS_A_TICK = 4 * PLACES
"""Where more requests wait than can be looked at so often, the time between two looks at each grows."""
_AT_ONCE = 32
"""Requests that are read one by one, or readers that are woken, in one turn of the event loop: two milliseconds."""


class QueuedFeeds:
    """The feeds of requests that wait in the queue with an empty log, and the task that looks at them.

    Each feed is in the slot of the tick of its next look, so that a tick touches no other feed.
    """

    def __init__(
        self, client: AsyncRedis, api_id: str, silence: float, read: Callable[[list[Feed]], Awaitable[None]]
    ) -> None:
        """`silence`: seconds until the second look; each later pause is longer, up to ten times of it. `read` takes
        feeds of one model that do not only wait; it raises RedisUnavailable."""
        self._client, self._api_id, self._silence, self._read = client, api_id, silence, read
        self._slots: dict[int, dict[Feed, None]] = {}
        self._task = PeriodicTask("queued", self._look, self._until_next, retry_s=silence)
        self.start, self.stop = self._task.start, self._task.stop

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
        feed.slot = int(look_at / _TICK_S)
        self._slots.setdefault(feed.slot, {})[feed] = None

    def _take(self, feed: Feed) -> None:
        slot = self._slots.get(feed.slot, {})
        slot.pop(feed, None)
        if not slot:
            self._slots.pop(feed.slot, None)

    def _until_next(self) -> float:
        return _TICK_S if self._slots else _REST_S

    async def _look(self) -> None:
        """Look at the feeds whose time has come, those first that wait for it longest."""
        now = asyncio.get_running_loop().time()
        by_model: dict[str, list[Feed]] = defaultdict(list)
        for feed in self._due(now):
            self._take(feed)
            if feed.begun and feed.error is None:
                by_model[feed.model].append(feed)
            else:
                self._put(feed, now + _TICK_S)
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
        slots = sorted(slot for slot in self._slots if slot <= now / _TICK_S)
        return list(islice(chain.from_iterable(self._slots[slot] for slot in slots), _LOOKS_A_TICK))

    async def _look_at(self, model: str, feeds: list[Feed]) -> None:
        # Of a request that another process began nothing is known yet.
        known = [feed for feed in feeds if feed.recoverable or feed.fields]
        places: list[Place | None] = []
        if known:
            places = await arun(self._client, requests.places(model, self._api_id, [feed.rid for feed in known]))
        others = [feed for feed in feeds if not (feed.recoverable or feed.fields)]
        woken, now = 0, asyncio.get_running_loop().time()
        for feed, place in zip(known, places, strict=True):
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
