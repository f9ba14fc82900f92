"""Calls of many coroutines on few connections: whatever comes while a round trip is under way shares the next one.

A connection for each would be slow to make, and a pool of them is soon used up: a thousand clients that come, or leave,
in one moment are a handful of round trips here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, TypeVar

from control.redis.clients import AsyncRedis
from control.redis.connection import Call, arun_all

T = TypeVar("T")

LARGEST_BATCH = 128
"""Calls in one round trip; each is a script of a fraction of a millisecond, and the first waits for the last."""


class Batches:
    """Runs calls in the order in which they come, by lane: one for each model, whose shard may be away alone."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._waiting: dict[str, deque[tuple[Call[Any], asyncio.Future[Any]]]] = defaultdict(deque)
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def run(self, lane: str, call: Call[T]) -> T:
        """Run one call; raises what its parse raises, or RedisUnavailable. Cancelled before it was sent, it is not."""
        return await self._queue(lane, call)

    async def run_all(self, lane: str, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run the calls; an error of one, RedisUnavailable too, stands in its place."""
        return await asyncio.gather(*(self._queue(lane, call) for call in calls), return_exceptions=True)

    async def run_every(self, lane: str, calls: Sequence[Call[Any]]) -> list[Any]:
        """As `run_all`, but raises the first error."""
        return await asyncio.gather(*(self._queue(lane, call) for call in calls))

    def _queue(self, lane: str, call: Call[Any]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append((call, answer))
        if lane not in self._sending:
            self._sending[lane] = asyncio.create_task(self._send(lane))
        return answer

    async def _send(self, lane: str) -> None:
        """Round trips until nothing waits."""
        waiting = self._waiting[lane]
        try:
            while batch := self._next(waiting):
                await self._exchange(batch)
        finally:
            del self._sending[lane], self._waiting[lane]
            for _, answer in waiting:
                answer.cancel()

    def _next(
        self, waiting: deque[tuple[Call[Any], asyncio.Future[Any]]]
    ) -> list[tuple[Call[Any], asyncio.Future[Any]]]:
        batch: list[tuple[Call[Any], asyncio.Future[Any]]] = []
        while waiting and len(batch) < LARGEST_BATCH:
            call, answer = waiting.popleft()
            if not answer.done():  # nobody waits any more
                batch.append((call, answer))
        return batch

    async def _exchange(self, batch: list[tuple[Call[Any], asyncio.Future[Any]]]) -> None:
        outcomes: list[Any]
        try:
            outcomes = await arun_all(self._client, [call for call, _ in batch])
        except asyncio.CancelledError:
            for _, answer in batch:
                answer.cancel()
            raise
        except Exception as error:
            outcomes = [error] * len(batch)
        for (_, answer), outcome in zip(batch, outcomes, strict=True):
            if answer.done():
                continue
            if isinstance(outcome, Exception):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)
