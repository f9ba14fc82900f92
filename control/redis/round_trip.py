"""The round trip to Redis, and this host's clock beside the one of Redis."""

from __future__ import annotations

import time
from typing import NamedTuple

from control.redis.clients import SyncRedis
from control.redis.connection import read, run

TRIES = 5


class RoundTrip(NamedTuple):
    """`ms` of the fastest of a few; `skew_ms` is this host's clock minus that of Redis, known to half a round trip."""

    ms: float
    skew_ms: int
    at_ms: int
    """The time by the clock of Redis."""


def measure(client: SyncRedis) -> RoundTrip:
    """Ask Redis for its time a few times. Of a Cluster one server is asked. Raises RedisUnavailable."""
    return min((_once(client) for _ in range(TRIES)), key=lambda one: one.ms)


def _once(client: SyncRedis) -> RoundTrip:
    before = time.time()
    began = time.perf_counter()
    there = run(client, read("TIME", parse=_seconds))
    took = time.perf_counter() - began
    return RoundTrip(took * 1000, round((before + took / 2 - there) * 1000), int(there * 1000))


def _seconds(reply: list[str] | tuple[int, int]) -> float:
    seconds, micros = reply
    return int(seconds) + int(micros) / 1e6
