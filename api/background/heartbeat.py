"""Writes this API process's heartbeat. When it lapses, other processes take over the requests that it followed."""

from __future__ import annotations

import contextlib
import os
import time

from api.http.tasks import PeriodicTask
from api.settings import ApiSettings
from control import constants, keys
from control.errors import RedisUnavailable
from control.placement import membership
from control.redis.clients import AsyncRedis
from control.redis.connection import arun, arun_every, read
from control.redis.outage import outage


class Heartbeat:
    """Writes the key four times in its life time, and deletes it at the stop."""

    def __init__(self, client: AsyncRedis, settings: ApiSettings) -> None:
        self._client = client
        self._settings = settings
        self._key = keys.api(settings.api_id)
        self._started = int(time.time())
        self._record_due = 0.0
        self._forgot = False
        self._task = PeriodicTask("heartbeat", self._run, constants.HEARTBEAT_MS / 4000)
        self.start = self._task.start

    async def stop(self) -> None:
        await self._task.stop()
        # The id stays among the known ones: requests that a cut stream left behind are found by it.
        with contextlib.suppress(RedisUnavailable):
            drop_records = membership.drop_api_records(self._settings.api_id)
            await arun_every(self._client, [read("DEL", self._key, parse=int), drop_records])

    async def _run(self) -> None:
        try:
            await self._beat()
        except RedisUnavailable as error:
            outage.waits("heartbeat", error)
            raise
        outage.goes_on("heartbeat")

    async def _beat(self) -> None:
        url = f"http://{self._settings.host}:{self._settings.port}"
        calls = membership.beat_api(self._settings.api_id, url, self._started)
        now = time.monotonic()
        if now >= self._record_due:
            host = os.uname().nodename
            record = membership.ApiRecord(url=url, host=host, pid=os.getpid(), at_ms=int(time.time() * 1000))
            calls.append(membership.put_api_record(self._settings.api_id, record))
            await self._forget_old(url)
        await arun_every(self._client, calls)
        if now >= self._record_due:
            self._record_due = now + membership.API_RECORD_S

    async def _forget_old(self, url: str) -> None:
        """Remove records of processes that ended long ago, and of the one that had this address before; once."""
        if self._forgot:
            return
        records = await arun(self._client, membership.api_records())
        oldest = int(time.time() * 1000) - membership.API_RECORD_LIFE_MS
        if old := [api_id for api_id, record in records.items() if record.at_ms < oldest or record.url == url]:
            await arun(self._client, membership.drop_api_records(*old))
        self._forgot = True
