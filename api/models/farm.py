"""Reads of the farm, made once for all who ask the same: snapshots once a second while anybody follows, and reads that
callers share. Reads for accounts have threads of their own, so that they can't delay operators.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import msgspec

from api.http.tasks import PeriodicTask
from api.schemas.farm import FarmAway, FarmCard
from control import access
from control.errors import RedisUnavailable
from control.operations.checks.report import read_farm_findings, read_redis
from control.placement import farm, membership
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import model_overviews
from control.requests.upkeep.dead import count_letters


def read_farm(client: SyncRedis, *, shared: bool = False) -> FarmCard:
    """The whole farm. `shared`: its models as any API process read them within the last second.

    Raises RedisUnavailable.
    """
    models = model_overviews.shared_overviews(client) if shared else model_overviews.overviews(client)
    letters = run_every(client, [count_letters(overview.model) for overview in models])
    hosts = farm.host_cards(client)
    servers, about_servers = read_redis(client)
    return FarmCard(
        models=models,
        hosts=hosts,
        apis=membership.living_apis(client),
        dead_letters={overview.model: count for overview, count in zip(models, letters, strict=True) if count},
        keys=run(client, access.count()),
        redis=servers,
        findings=[*about_servers, *read_farm_findings(client, hosts, models)],
    )


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


P = ParamSpec("P")
T = TypeVar("T")

AGE_S = 1.0
"""An answer is given to others until so long after its reading began."""
THREADS = 16
"""Of their own: slow reads must not keep tokenizers waiting, nor a few of them the others."""
ACCOUNT_THREADS = 2
"""For the reads of accounts: as many as they are, operators read beside them."""


@dataclass(frozen=True, slots=True)
class _Reading:
    answer: asyncio.Future[Any]
    began_at: float
    """By the loop's clock."""


class SharedReads:
    """Runs reads in threads. Callers with the same function and arguments share one under way, or one just made.

    An error goes to all who wait for it, and is not kept. A caller that is cancelled leaves the read to the others.
    """

    def __init__(self, client: SyncRedis, threads: int = THREADS) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(threads, "farm-read")
        self._readings: dict[Hashable, _Reading] = {}

    async def read(
        self, work: Callable[Concatenate[SyncRedis, P], T], fresh: bool, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`work(client, …)`; raises its errors. `fresh`: nothing that was begun before is taken."""
        loop = asyncio.get_running_loop()
        key: Hashable = (work, args, tuple(sorted(kwargs.items())))
        reading = self._readings.get(key)
        if reading is None or fresh or (reading.answer.done() and loop.time() - reading.began_at >= AGE_S):
            reading = _Reading(
                loop.run_in_executor(self._threads, lambda: work(self._client, *args, **kwargs)), loop.time()
            )
            self._readings[key] = reading
            reading.answer.add_done_callback(lambda _, ended=reading: self._done(key, ended))
        return await asyncio.shield(reading.answer)

    def forget(self) -> None:
        """Begin every read anew from here on: something was changed."""
        self._readings.clear()

    def stop(self) -> None:
        """Begin no further read. Returns at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, key: Hashable, reading: _Reading) -> None:
        failed = reading.answer.cancelled() or reading.answer.exception() is not None
        loop = reading.answer.get_loop()
        if failed:
            self._drop(key, reading)
        else:
            loop.call_at(reading.began_at + AGE_S, self._drop, key, reading)

    def _drop(self, key: Hashable, reading: _Reading) -> None:
        if self._readings.get(key) is reading:
            del self._readings[key]


class AccountReads:
    """Reads of what an account may see of itself, in few threads of their own: one at a time for each account."""

    def __init__(self, client: SyncRedis) -> None:
        self._shared = SharedReads(client, ACCOUNT_THREADS)
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def read(
        self, account: str, work: Callable[Concatenate[SyncRedis, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`work(client, …)`, or its answer to the same within the last second; raises its errors."""
        turn = self._turns.get(account)
        if turn is None:
            turn = self._turns[account] = asyncio.Lock()
        await turn.acquire()
        reading = asyncio.create_task(self._shared.read(work, False, *args, **kwargs))

        def done(task: asyncio.Task[T]) -> None:
            turn.release()
            if not task.cancelled():
                task.exception()  # a client that left does not take it

        # Also where the client leaves: its account's next read waits for the one that goes on.
        reading.add_done_callback(done)
        return await asyncio.shield(reading)

    def stop(self) -> None:
        """As of SharedReads."""
        self._shared.stop()
