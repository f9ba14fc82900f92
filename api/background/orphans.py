"""Ends requests of clients that left, of API processes that died, and of failed models while no agent lives."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import structlog

from api.http.tasks import PeriodicTask
from control import keys
from control.records import catalog
from control.redis.clients import AsyncRedis, SyncRedis
from control.redis.connection import Steps, arun_steps, read, run, run_every, run_steps
from control.requests import Reaped, gone_apis, reap, reap_all, take_round
from control.requests.upkeep.stranded import StrandedRequests

log = structlog.stdlib.get_logger(__name__)

EVERY_S = 1.0
LOOK_FOR_GONE_EVERY_S = 5.0
GONE_AT_ONCE = 64
"""Processes whose requests one round looks for: each adds to the work of the script that does it."""
_TOGETHER = 64
"""Models in one round trip."""


@dataclass(frozen=True, slots=True)
class _Round:
    """The outcome of one round: API processes that are gone, requests that were ended, models with more of them, and
    whether an agent holds the placement lock."""

    lapsed: list[str]
    ended: dict[str, Reaped]
    placed: bool

    @property
    def is_over(self) -> bool:
        """True if nothing is left to be done."""
        return self.placed and not self.lapsed and not any(reaped.more for reaped in self.ended.values())


class OrphanReaper:
    """Runs in every API process; one of them makes a round each second. The same work done twice is harmless.

    What every round asks is asked on the event loop, which costs less than a thread; the rest is done in one.
    """

    def __init__(self, client: SyncRedis, api_id: str, async_client: AsyncRedis | None = None) -> None:
        """Without `async_client` only `reap` can be called."""
        self._client = client
        self._api_id = api_id
        self._async_client = async_client
        self._looked_at = 0.0
        self._stranded = StrandedRequests(client)
        self._task = PeriodicTask("reap", self._areap, EVERY_S, delayed=True)
        self.start = self._task.start
        self.stop = self._task.stop

    def reap(self) -> None:
        """One round over all models, unless another process has made this second's."""
        result = run_steps(self._client, self._round())
        if not result.is_over:
            self._finish(result)

    async def _areap(self) -> None:
        assert self._async_client is not None
        result = await arun_steps(self._async_client, self._round())
        if not result.is_over:
            await asyncio.to_thread(self._finish, result)

    def _round(self) -> Steps[_Round]:
        """The round trips of every round; one where it is another process's."""
        placement_lock = read("EXISTS", keys.PLACEMENT_LOCK, parse=bool)
        mine, placed, models = yield [take_round(self._api_id), placement_lock, catalog.names()]
        if not mine:
            return _Round([], {}, True)
        lapsed: list[str] = []
        if time.monotonic() - self._looked_at >= LOOK_FOR_GONE_EVERY_S:
            self._looked_at = time.monotonic()
            all_lapsed = yield from gone_apis()
            lapsed = all_lapsed[:GONE_AT_ONCE]
            if len(all_lapsed) > len(lapsed):
                self._looked_at = 0.0  # the rest comes in the next round
        ended: dict[str, Reaped] = {}
        for at in range(0, len(models), _TOGETHER):
            part = models[at : at + _TOGETHER]
            ended |= zip(part, (yield [reap(model, lapsed) for model in part]), strict=True)
        for model, reaped in ended.items():
            _tell(model, reaped.rids)
        return _Round(lapsed, ended, placed)

    def _finish(self, result: _Round) -> None:
        """Do what a round left, which is seldom anything."""
        for model, reaped in result.ended.items():
            if reaped.more:
                _tell(model, reap_all(self._client, model, result.lapsed))
        if result.lapsed:
            # Struck from every request: a process that only slept puts itself back with its next beat.
            run(self._client, read("SREM", keys.APIS, *result.lapsed, parse=int))
            log.info("api processes are gone", action="reap", apis=result.lapsed)
        if not result.placed:
            self._end_stranded()

    def _end_stranded(self) -> None:
        """The duty of the agent that holds the placement lock, while there is none."""
        specs = catalog.list_specs(self._client)
        replica_lists = run_every(self._client, [catalog.replicas(spec.name) for spec in specs])
        self._stranded.end(
            specs, {spec.name: list(replicas) for spec, replicas in zip(specs, replica_lists, strict=True)}
        )


def _tell(model: str, rids: list[str]) -> None:
    if rids:
        log.info("ended requests that nobody follows", action="reap", model=model, requests=len(rids))
