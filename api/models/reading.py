"""Reading the state of every model: of a small farm on the event loop, which costs less than a thread does."""

from __future__ import annotations

import asyncio

from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.rounds import arun_rounds, run_rounds
from control.replicas import health

LARGE = 64
"""Replicas of a farm that is read in a thread: the event loop would do nothing else for a millisecond or more."""


class OverviewReader:
    """Reads the overviews of the models, by name."""

    def __init__(self, client: SyncRedis, async_client: AsyncRedis | None) -> None:
        """Without `async_client` each reading is made in a thread."""
        self._client, self._async_client = client, async_client
        self._size = LARGE
        """Replicas at the last reading."""

    async def read(self, shared: bool) -> dict[str, health.Overview]:
        """`shared`: as another process read them within the last second. Raises RedisUnavailable."""
        rounds = health.reading_shared() if shared else health.reading_overviews()
        if self._async_client is not None and self._size < LARGE:
            found = await arun_rounds(self._async_client, rounds)
        else:
            found = await asyncio.to_thread(run_rounds, self._client, rounds)
        self._size = sum(len(one.replicas) for one in found)
        return {overview.model: overview for overview in found}
