"""Carries out on_disconnect for requests that nobody follows: an api process died, or the wait it asked for is over."""

from __future__ import annotations

import asyncio
import time

import structlog

from api.tasks import end
from control import catalog, keys
from control.clients import SyncRedis
from control.connection import read, run, run_all
from control.errors import RedisUnavailable
from control.requests import gone_apis, reap, reap_all, take_round

log = structlog.stdlib.get_logger(__name__)

EVERY_S = 1.0
LOOK_FOR_GONE_EVERY_S = 5.0


class OrphanReaper:
    """Runs in every api process, of which one makes a round in a second. The same work done twice is harmless."""

    def __init__(self, client: SyncRedis, api_id: str) -> None:
        self._client, self._api_id = client, api_id
        self._looked = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            await end(self._task)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                await asyncio.to_thread(self.reap)
            except RedisUnavailable:
                continue  # others say so
            except Exception as error:
                log.error("reaping orphans failed", action="reap", exc_info=error)

    def reap(self) -> None:
        """One round over all models, unless another process has made this second's."""
        if not take_round(self._client, self._api_id):
            return
        gone: list[str] = []
        if time.monotonic() - self._looked >= LOOK_FOR_GONE_EVERY_S:
            self._looked = time.monotonic()
            gone = gone_apis(self._client)
        models = [spec.name for spec in catalog.list_specs(self._client)]
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
