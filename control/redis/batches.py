"""Calls of many coroutines on few connections: whatever comes while a round trip is under way shares the next one.

A connection for each would be slow to make, and a pool of them is soon used up: a thousand clients that come, or leave,
in one moment are a handful of round trips here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from control.redis.clients import AsyncRedis
from control.redis.connection import Call, arun_all

T = TypeVar("T")

LARGEST_BATCH = 128
"""Calls in one round trip; each is a script of a fraction of a millisecond, and the first waits for the last."""


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    call: Call[Any]
    answer: asyncio.Future[Any]
    check: Callable[[], object] | None = None


class Batches:
    """Runs calls in the order in which they come, by lane: one for each model, whose shard may be away alone."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._waiting: dict[str, deque[_Waiting]] = defaultdict(deque)
        self._sending: dict[str, asyncio.Task[None]] = {}

    async def run(self, lane: str, call: Call[T], check: Callable[[], object] | None = None) -> T:
        """Run one call; raises what its parse raises, or RedisUnavailable. Cancelled before it was sent, it is not.

        `check` runs just before the call is sent; what it raises is raised here, and the call is not sent.
        """
        return await self._queue(lane, call, check)

    async def run_all(self, lane: str, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run the calls; an error of one, RedisUnavailable too, stands in its place."""
        return await asyncio.gather(*(self._queue(lane, call) for call in calls), return_exceptions=True)

    async def run_every(self, lane: str, calls: Sequence[Call[Any]]) -> list[Any]:
        """As `run_all`, but raises the first error."""
        return await asyncio.gather(*(self._queue(lane, call) for call in calls))

    def _queue(self, lane: str, call: Call[Any], check: Callable[[], object] | None = None) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[lane].append(_Waiting(call, answer, check))
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
            for one in waiting:
                one.answer.cancel()

    def _next(self, waiting: deque[_Waiting]) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while waiting and len(batch) < LARGEST_BATCH:
            one = waiting.popleft()
            if one.answer.done():  # nobody waits any more
                continue
            try:
                if one.check is not None:
                    one.check()
                batch.append(one)
            except Exception as error:
                one.answer.set_exception(error)
        return batch

    async def _exchange(self, batch: list[_Waiting]) -> None:
        outcomes: list[Any]
        try:
            outcomes = await arun_all(self._client, [one.call for one in batch])
        except asyncio.CancelledError:
            for one in batch:
                one.answer.cancel()
            raise
        except Exception as error:
            outcomes = [error] * len(batch)
        for one, outcome in zip(batch, outcomes, strict=True):
            if one.answer.done():
                continue
            if isinstance(outcome, Exception):
                one.answer.set_exception(outcome)
            else:
                one.answer.set_result(outcome)
