"""Tells the farm that this API process lives: when its heartbeat lapses, others care for the requests it followed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from redis.exceptions import RedisError

from api.settings import ApiSettings
from control import keys
from control.clients import AsyncRedis
from control.outage import outage


class Heartbeat:
    """Beats four times in the life of the key, and forgets the process at its end."""

    def __init__(self, client: AsyncRedis, settings: ApiSettings) -> None:
        self._client, self._settings = client, settings
        self._key = keys.api(settings.api_id)
        self._started = int(time.time())
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        # The id stays among the known ones: requests that a cut stream left behind are found by it.
        with contextlib.suppress(RedisError, OSError):
            await self._client.delete(self._key)

    async def _run(self) -> None:
        while True:
            try:
                await self._beat()
                outage.goes_on("heartbeat")
            except (RedisError, OSError) as error:
                outage.waits("heartbeat", error)
            await asyncio.sleep(keys.HEARTBEAT_MS / 4000)

    async def _beat(self) -> None:
        fields: dict[Any, Any] = {
            "url": f"http://{self._settings.host}:{self._settings.port}",
            "started": self._started,
        }
        pipeline = self._client.pipeline(transaction=True)
        pipeline.sadd(keys.APIS, self._settings.api_id)
        pipeline.hset(self._key, mapping=fields)
        pipeline.pexpire(self._key, keys.HEARTBEAT_MS)
        await pipeline.execute()
