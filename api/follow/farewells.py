"""Tells Redis which requests this process follows no more; nobody waits for it, and it gets in nobody's way."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine

import structlog

from api.follow.feed import Feed
from control import requests
from control.errors import RedisUnavailable
from control.redis.batches import Batches
from control.redis.connection import Call

log = structlog.stdlib.get_logger(__name__)

_LAST_S = 5.0
"""Given to what was begun, when the process stops; orphans are reaped by others."""
_LINGER_S = 0.005
"""Of what is delivered nothing but a time is left to tell: it waits for others, and the next request goes first."""


class Farewells:
    """Unfollows: at once where the request may go on, a little later where its client has all of it."""

    def __init__(self, batches: Batches, api_id: str) -> None:
        self._batches, self._api = batches, api_id
        self._delivered: dict[str, dict[str, Call[None]]] = defaultdict(dict)
        self._timer: asyncio.TimerHandle | None = None
        self._telling: set[asyncio.Task[None]] = set()

    def say(self, feed: Feed, delivered_ms: int | None, grace_ms: int) -> None:
        """Returns at once, so that it can be called while a cancelled handler unwinds."""
        call = requests.unfollow(feed.model, feed.rid, self._api, delivered_ms, grace_ms)
        if delivered_ms is None:
            # In the model's own lane: who comes back to the request follows it after this.
            self._begin(self._tell(feed.model, {feed.rid: call}))
            return
        self._delivered[feed.model][feed.rid] = call
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LINGER_S, self._tell_delivered)

    async def stop(self) -> None:
        """Let what was said come to its end."""
        self._tell_delivered()
        if self._telling:
            await asyncio.wait(self._telling, timeout=_LAST_S)

    def _tell_delivered(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for model, calls in self._delivered.items():
            self._begin(self._tell(f"{model} delivered", calls))
        self._delivered = defaultdict(dict)

    def _begin(self, telling: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(telling)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, lane: str, calls: dict[str, Call[None]]) -> None:
        for rid, outcome in zip(calls, await self._batches.run_all(lane, list(calls.values())), strict=True):
            if isinstance(outcome, RedisUnavailable):
                # Once this api's heartbeat has lapsed, whoever reaps orphans applies on_disconnect.
                log.warning("could not unfollow", action="unfollow", rid=rid, lane=lane, error=str(outcome))
            elif isinstance(outcome, Exception):
                raise outcome
