"""Snapshots of the farm, once a second while anybody follows: one reading for all followers of this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from api.http.tasks import PeriodicTask
from api.models.farm import read_farm
from api.schemas.farm import FarmAway
from control.errors import RedisUnavailable
from control.redis.clients import SyncRedis

EVERY_S = 1.0


class FarmEvents:
    """The stream of `GET /farm/events`. A follower that reads slowly misses snapshots and delays nobody."""

    def __init__(self, client: SyncRedis, ended: Callable[[], bool]) -> None:
        """`ended` is true once this process shuts down: every stream ends then."""
        self._client = client
        self._ended = ended
        self._followers = 0
        self._task: PeriodicTask | None = None
        self._event = b""
        self._next = asyncio.Event()

    async def follow(self, allowed: Callable[[], Awaitable[bool]]) -> AsyncGenerator[bytes, None]:
        """Server-sent events: `farm` with a FarmCard, or `away` with the error while Redis does not answer.

        `allowed` is asked before each event after the first; the stream ends when it is false.
        """
        self._followers += 1
        try:
            if self._task is None:
                self._task = PeriodicTask("farm_events", self._read, EVERY_S)
                self._task.start()
            elif self._event:
                yield self._event
            while not self._ended():
                await self._next.wait()
                if not await allowed():
                    return
                yield self._event
        finally:
            self._followers -= 1
            if not self._followers:
                await self.stop()

    async def stop(self) -> None:
        """End the readings."""
        task = self._task
        self._task = None
        self._event = b""
        if task is not None:
            await task.stop()

    async def _read(self) -> None:
        """Read once, and wake the followers."""
        try:
            card = await asyncio.to_thread(read_farm, self._client, shared=True)
            event = b"event: farm\ndata: " + msgspec.json.encode(card)
        except RedisUnavailable as error:
            event = b"event: away\ndata: " + msgspec.json.encode(FarmAway(error=str(error)))
        self._event = event + b"\n\n"
        woken = self._next
        self._next = asyncio.Event()
        woken.set()
