"""Files of models that broke their bounds in an API process, for the doctor and the console."""

from __future__ import annotations

import time

import msgspec

from control import keys
from control.redis.clients import SyncRedis
from control.redis.connection import read, run_every, write

KEPT_S = 3600
"""How long a breach is told after the last one."""
CALLS = "calls"
"""In place of a file: the form in which the model writes calls of tools is not known to an API process."""


class Breach(msgspec.Struct, frozen=True):
    """A file, as "chat template", what it did, and when, in Unix seconds."""

    file: str
    deed: str
    at: int


def note_breach(client: SyncRedis, model: str, file: str, deed: str) -> None:
    """Keep the latest breach of each file. Raises RedisUnavailable."""
    key = keys.ModelKeys(model).breaches
    value = msgspec.json.encode(Breach(file, deed[:200], int(time.time())))
    run_every(
        client,
        [write("HSET", key, file, value, parse=int), write("PEXPIRE", key, KEPT_S * 1000, parse=int)],
    )


def breaches_of(client: SyncRedis, models: list[str]) -> dict[str, list[Breach]]:
    """By model, the latest breach of each file. Raises RedisUnavailable."""
    calls = [read("HVALS", keys.ModelKeys(model).breaches, parse=_breaches) for model in models]
    return dict(zip(models, run_every(client, calls), strict=True))


def _breaches(values: list[bytes | str]) -> list[Breach]:
    return sorted((msgspec.json.decode(value, type=Breach) for value in values), key=lambda one: one.file)
