"""Tells Redis which requests this process no longer follows, in the background."""

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
"""Time given at the stop to calls under way. The orphan reaper of another process does what they leave."""
_LINGER_S = 0.005
"""Calls about delivered answers only record a time: they wait for others to share a batch."""


class UnfollowQueue:
    """Sends a call at once where its request may go on, a few milliseconds later where the client has the answer."""

    def __init__(self, batches: Batches, api_id: str) -> None:
        self._batches, self._api = batches, api_id
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
