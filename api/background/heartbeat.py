"""Writes this API process's heartbeat. When it lapses, other processes take over the requests that it followed."""

from __future__ import annotations

import contextlib
import time

from api.asgi.tasks import PeriodicTask
from api.settings import ApiSettings
from control import constants, keys
from control.errors import RedisUnavailable
from control.placement import farm
from control.redis.clients import AsyncRedis
from control.redis.connection import arun, arun_every, read
from control.redis.outage import outage


class Heartbeat:
    """Writes the key four times in its life time, and deletes it at the stop."""

    def __init__(self, client: AsyncRedis, settings: ApiSettings) -> None:
        self._client, self._settings = client, settings
        self._key = keys.api(settings.api_id)
        self._started = int(time.time())
        self._task = PeriodicTask("heartbeat", self._run, constants.HEARTBEAT_MS / 4000)

    def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        await self._task.stop()
        # The id stays among the known ones: requests that a cut stream left behind are found by it.
        with contextlib.suppress(RedisUnavailable):
            await arun(self._client, read("DEL", self._key, parse=int))

    async def _run(self) -> None:
        try:
            await self._beat()
        except RedisUnavailable as error:
            outage.waits("heartbeat", error)
            raise
        outage.goes_on("heartbeat")

    async def _beat(self) -> None:
        url = f"http://{self._settings.host}:{self._settings.port}"
        await arun_every(self._client, farm.beat_api(self._settings.api_id, url, self._started))
