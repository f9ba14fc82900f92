"""Ends requests of clients that left, of API processes that died, and of failed models while no agent lives."""

from __future__ import annotations

import asyncio
import time

import structlog

from api.asgi.tasks import PeriodicTask
from control import keys
from control.messages import ModelSpec
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import read, run, run_all, run_every
from control.requests import gone_apis, reap, reap_all, take_round
from control.requests.upkeep.stranded import StrandedRequests

log = structlog.stdlib.get_logger(__name__)

EVERY_S = 1.0
LOOK_FOR_GONE_EVERY_S = 5.0
GONE_AT_ONCE = 64
"""Processes whose requests one round looks for: each adds to the work of the script that does it."""


class OrphanReaper:
    """Runs in every API process; one of them makes a round each second. The same work done twice is harmless."""

    def __init__(self, client: SyncRedis, api_id: str) -> None:
        self._client, self._api_id = client, api_id
        self._looked = 0.0
        self._stranded = StrandedRequests(client)
        self._task = PeriodicTask("reap", self._reap_in_thread, EVERY_S, delayed=True)

    def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        await self._task.stop()

    async def _reap_in_thread(self) -> None:
        await asyncio.to_thread(self.reap)

    def reap(self) -> None:
        """One round over all models, unless another process has made this second's."""
        if not take_round(self._client, self._api_id):
            return
        gone: list[str] = []
        if time.monotonic() - self._looked >= LOOK_FOR_GONE_EVERY_S:
            self._looked = time.monotonic()
            found = gone_apis(self._client)
            gone = found[:GONE_AT_ONCE]
            if len(found) > len(gone):
                self._looked = 0.0  # the rest comes in the next round
        specs = catalog.list_specs(self._client)
        models = [spec.name for spec in specs]
        for model, ended in zip(models, run_all(self._client, [reap(model, gone) for model in models]), strict=True):
            if isinstance(ended, Exception):
                raise ended
            rids = ended.rids + (reap_all(self._client, model, gone) if ended.more else [])
            if rids:
                log.info("ended requests that nobody follows", action="reap", model=model, requests=len(rids))
        if gone:
            # Struck from every request: a process that only slept puts itself back with its next beat.
            run(self._client, read("SREM", keys.APIS, *gone, parse=int))
            log.info("api processes are gone", action="reap", apis=gone)
        self._end_stranded(specs)

    def _end_stranded(self, specs: list[ModelSpec]) -> None:
        """The duty of the agent that holds the placement lock, while there is none."""
        if run(self._client, read("EXISTS", keys.PLACEMENT_LOCK, parse=bool)):
            return
        found = run_every(self._client, [catalog.replicas(spec.name) for spec in specs])
        self._stranded.end(specs, {spec.name: list(known) for spec, known in zip(specs, found, strict=True)})
