"""Collects the timestamps of requests from Redis as they end: they live only two minutes longer."""

from __future__ import annotations

import asyncio
from typing import Any

from control.keys import ModelKeys
from control.redis.clients import AsyncRedis
from control.redis.connection import arun_all, read
from ops.bench.common.ask import Answer, now_ms
from ops.bench.load.segments import STAMPS

EVERY_S = 0.2
PATIENCE_MS = 5_000.0
"""The API writes t_delivered after the client has its answer; later than this it is missing."""


class StampCollector:
    """Reads each ended request's stamps once they are complete, in one round trip for all that wait."""

    def __init__(self, client: AsyncRedis) -> None:
        self._client = client
        self._waiting: list[Answer] = []
        self.found: dict[str, dict[str, float]] = {}
        """rid → stamp → ms, `client_end` included; incomplete where the hash stayed so."""

    def add(self, answer: Answer) -> None:
        self._waiting.append(answer)

    async def run(self, more: asyncio.Event) -> None:
        """Collect until `more` is set (no further answer will be added) and nothing waits."""
        while self._waiting or not more.is_set():
            await self._round()
            await asyncio.sleep(EVERY_S)

    async def _round(self) -> None:
        waiting, self._waiting = self._waiting, []
        calls = [
            read("HMGET", ModelKeys(answer.model).request(answer.rid), *STAMPS, parse=_stamps) for answer in waiting
        ]
        for answer, stamps in zip(waiting, await arun_all(self._client, calls), strict=True):
            if isinstance(stamps, Exception):
                raise stamps
            if len(stamps) < len(STAMPS) and now_ms() - answer.end_ms < PATIENCE_MS:
                self._waiting.append(answer)
            else:
                self.found[answer.rid] = {**stamps, "client_end": answer.end_ms}


def _stamps(reply: list[Any]) -> dict[str, float]:
    return {stamp: float(value) for stamp, value in zip(STAMPS, reply, strict=True) if value}
