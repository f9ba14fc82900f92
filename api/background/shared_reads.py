"""Reads for operators, made once for all who ask the same within a second: fifty pages cost Redis what one does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

from control.redis.clients import SyncRedis

P = ParamSpec("P")
T = TypeVar("T")

AGE_S = 1.0
"""An answer is given to others until so long after its reading began."""
THREADS = 16
"""Of their own: slow reads must not keep tokenizers waiting, nor a few of them the others."""


@dataclass(frozen=True, slots=True)
class _Reading:
    answer: asyncio.Future[Any]
    began_at: float
    """By the loop's clock."""


class SharedReads:
    """Runs reads in threads. Callers with the same function and arguments share one under way, or one just made.

    An error goes to all who wait for it, and is not kept. A caller that is cancelled leaves the read to the others.
    """

    def __init__(self, client: SyncRedis) -> None:
        self._client = client
        self._threads = ThreadPoolExecutor(THREADS, "farm-read")
        self._readings: dict[Hashable, _Reading] = {}

    async def read(
        self, work: Callable[Concatenate[SyncRedis, P], T], fresh: bool, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """`work(client, …)`; raises its errors. `fresh`: nothing that was begun before is taken."""
        loop = asyncio.get_running_loop()
        key: Hashable = (work, args, tuple(sorted(kwargs.items())))
        known = self._readings.get(key)
        if known is None or fresh or (known.answer.done() and loop.time() - known.began_at >= AGE_S):
            known = _Reading(
                loop.run_in_executor(self._threads, lambda: work(self._client, *args, **kwargs)), loop.time()
            )
            self._readings[key] = known
            known.answer.add_done_callback(lambda _, made=known: self._done(key, made))
        return await asyncio.shield(known.answer)

    def forget(self) -> None:
        """Begin every read anew from here on: something was changed."""
        self._readings.clear()

    def stop(self) -> None:
        """Begin no further read. Returns at once."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, key: Hashable, made: _Reading) -> None:
        failed = made.answer.cancelled() or made.answer.exception() is not None
        loop = made.answer.get_loop()
        if failed:
            self._drop(key, made)
        else:
            loop.call_at(made.began_at + AGE_S, self._drop, key, made)

    def _drop(self, key: Hashable, made: _Reading) -> None:
        if self._readings.get(key) is made:
            del self._readings[key]
