"""The API processes of a farm: what each asks of Redis once a second, whatever its clients do."""

from __future__ import annotations

import asyncio
import time

from api.background.orphans import OrphanReaper
from api.models.models import Models
from api.settings import ApiSettings
from control import keys
from control.placement import farm
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from ops.bench.scale.agents import Agents
from ops.bench.scale.crowd import Size
from ops.bench.scale.rounds import Round

_RIGHTS = (keys.REAPER_LOCK, keys.OVERVIEWS_LOCK)


class ApiProcesses:
    """The background work of the API processes. They share one Models object, so that tokenizers are read once."""

    def __init__(self, client: SyncRedis, agents: Agents, size: Size) -> None:
        self._client, self._agents = client, agents
        self._names = [f"api-{index}" for index in range(size.apis)]
        self._models = Models(client, ApiSettings(redis_url=""))
        asyncio.run(self._models.look(shared=True))

    def rounds(self) -> list[Round]:
        """A second of each: two heartbeats, its part in reaping, and its look at the models. The first does for all
        what one process in a second does; it keeps that right, however long the others take one after the other."""
        for key in _RIGHTS:
            self._client.delete(key)
        found: list[Round] = []
        for name in self._names:
            reaper = OrphanReaper(self._client, name)
            for each in self._names:
                self._beat(each)
            found.append(self._agents.watch(lambda name=name, reaper=reaper: self._second(name, reaper)))
            for key in _RIGHTS:
                self._client.set(key, "the first", px=600_000)
            self._client.persist(keys.OVERVIEWS)
        for key in (*_RIGHTS, keys.OVERVIEWS):
            self._client.delete(key)
        return found

    def _second(self, name: str, reaper: OrphanReaper) -> None:
        self._beat(name)
        self._beat(name)
        reaper.reap()
        asyncio.run(self._models.look(shared=True))

    def _beat(self, name: str) -> None:
        run_every(self._client, farm.beat_api(name, f"http://{name}", int(time.time())))
