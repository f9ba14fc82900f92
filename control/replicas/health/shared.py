"""The overviews as one API process reads them for all: in a large farm each reading is thousands of commands."""

from __future__ import annotations

import msgspec

from control import constants, keys
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Steps, optional_text, read, run_steps, write
from control.replicas.health.overview import Overview, reading_overviews

_decode = msgspec.json.Decoder(list[Overview]).decode


def shared_overviews(client: SyncRedis) -> list[Overview]:
    """As `overviews`, but up to about a second old: one caller in a second reads them, the others take what it wrote.

    Raises RedisUnavailable.
    """
    return run_steps(client, reading_shared())


def reading_shared() -> Steps[list[Overview]]:
    """The round trips of `shared_overviews`: one where another process has read them."""
    turn = write("SET", keys.OVERVIEWS_LOCK, "1", "NX", "PX", constants.ROUND_MS, parse=bool)
    stored = read("GET", keys.OVERVIEWS, parse=optional_text)
    mine, written, names = yield [turn, stored, catalog.names()]
    if not mine and written is not None:
        try:
            return _decode(written)
        except msgspec.DecodeError:  # of another version of Furrow
            pass
    models = yield from reading_overviews(names)
    text = msgspec.json.encode(models).decode()
    yield [write("SET", keys.OVERVIEWS, text, "PX", constants.OVERVIEWS_MS, parse=bool)]
    return models
