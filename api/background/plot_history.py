"""Samples of the farm every ten seconds for the console's plots: an operator who opens the console after a fault needs
the past, and most farms have no Prometheus.

One API process of all, chosen by a lock of 9 s, writes them into a capped stream (`plots`) of 360 entries, about 1 MB
in Redis, from overviews that it reads anyway. Without any API process there is a gap. The agents' `/metrics` would not
do: they may not be reachable, and hold no past. More than an hour, or replicas, is for Prometheus.
"""

from __future__ import annotations

from api.http.tasks import PeriodicTask
from api.models.models import ModelRegistry
from control.clock import now_ms
from control.errors import RedisFull
from control.operations.plots import EVERY_MS, Reading, counts_of, keep, sample, take_turn
from control.redis.clients import AsyncRedis
from control.redis.connection import arun, arun_every


class PlotHistory:
    """The counts of the last round, and the samples that follow from them."""

    def __init__(self, client: AsyncRedis, models: ModelRegistry) -> None:
        self._client = client
        self._models = models
        self._before: Reading = {}
        self._since_ms = 0
        self._task = PeriodicTask("plot_history", self._run, EVERY_MS / 1000)
        self.start = self._task.start
        self.stop = self._task.stop

    async def _run(self) -> None:
        overviews = self._models.overviews
        at = now_ms()
        before = self._before
        since = self._since_ms
        self._before, self._since_ms = counts_of(overviews), at
        # The first round has nothing to compare with.
        if not since or not overviews or not await arun(self._client, take_turn()):
            return
        try:
            await arun_every(self._client, keep(sample(overviews, before, since, at)))
        except RedisFull:
            return  # nothing depends on it
