"""Applies settlements of API keys' limits, for the requests of all processes. The same work done twice is harmless."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterable

from api.access.keyring import LANE
from api.asgi.tasks import PeriodicTask
from control.access import forget, metered_models, pending
from control.access.settlements import MOST_READ
from control.errors import RedisUnavailable
from control.redis.batches import Batches

SWEEP_S = 2.0
"""Mean time between looks at all models, for requests that no process follows."""
HOT_S = 2.0
"""A model is looked at for so long after a client's request is over: its leader may end it a moment later."""
HOT_EVERY_S = 0.25


class Settler:
    """Looks at once at a model of which a request may have ended, now and then at all models, and at `stop`."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._hot: dict[str, float] = {}
        """Model → the time of this loop until which it is looked at."""
        self._sweep_at = 0.0
        self._task = PeriodicTask("settle", self._settle, self._until_next, retry_s=SWEEP_S)

    def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        await self._task.stop()
        with contextlib.suppress(RedisUnavailable):
            await self._apply_all(self._hot)

    def nudge(self, model: str) -> None:
        """A request of a limited key is over, or soon will be. Returns at once."""
        self._hot[model] = asyncio.get_running_loop().time() + HOT_S
        self._task.wake()

    async def apply(self, model: str) -> bool:
        """Apply all settlements of a model; True if there were any. Raises RedisUnavailable."""
        found = False
        while True:
            settlements = await self._batches.run(model, pending(model))
            if not settlements:
                return found
            found = True
            outcomes = await self._batches.run_all(LANE, [settlement.apply() for settlement in settlements])
            done = [one for one, outcome in zip(settlements, outcomes, strict=True) if isinstance(outcome, bool)]
            if done:
                await self._batches.run(model, forget(model, done))
            for outcome in outcomes:
                if isinstance(outcome, Exception):
                    raise outcome
            if len(settlements) < MOST_READ:
                return found

    async def _settle(self) -> None:
        clock = asyncio.get_running_loop().time
        now = clock()
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S * random.uniform(0.5, 1.5)  # so that the processes do not read all at once
            await self._apply_all(await self._batches.run(LANE, metered_models()))
        else:
            await self._apply_all(self._hot)
        self._hot = {model: until for model, until in self._hot.items() if until > clock()}

    def _until_next(self) -> float:
        """Seconds until the next look at hot models, or the next sweep."""
        until_sweep = self._sweep_at - asyncio.get_running_loop().time()
        return min(HOT_EVERY_S, until_sweep) if self._hot else until_sweep

    async def _apply_all(self, models: Iterable[str]) -> None:
        for outcome in await asyncio.gather(*(self.apply(model) for model in models), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome
