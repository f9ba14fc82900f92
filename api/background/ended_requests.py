"""Tells the farm which requests have ended at this process: once a second, in one round trip."""

from __future__ import annotations

import contextlib
from collections import deque

from api.http.tasks import PeriodicTask
from control.errors import RedisFull, RedisUnavailable
from control.records.api_reports import EndedRequest, note
from control.redis.clients import AsyncRedis
from control.redis.connection import arun_every

_EVERY_S = 1.0
_MOST = 200
"""Records of one round: with more ends a second the newest are told."""
_STRANGERS = (401, 403)
"""Statuses of callers without a right here: they could push all others out."""


class EndedRequests:
    """Collects ends between two rounds."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._records = deque[EndedRequest](maxlen=_MOST)
        self._task = PeriodicTask("ended_requests", self._run, _EVERY_S)
        self.start = self._task.start

    def note(self, record: EndedRequest) -> None:
        """The request has ended."""
        if record.status not in _STRANGERS:
            self._records.append(record)

    async def stop(self) -> None:
        """Tell the rest, if Redis takes it."""
        await self._task.stop()
        with contextlib.suppress(RedisUnavailable, RedisFull):
            await self._run()

    async def _run(self) -> None:
        if not self._records:
            return
        records = [*self._records]
        self._records.clear()
        with contextlib.suppress(RedisFull):  # nothing depends on them
            await arun_every(self._client, note(records))
