"""The overviews as one API process reads them for all: in a large farm each reading is thousands of commands."""

from __future__ import annotations

import msgspec

from control import constants, keys
from control.redis.clients import SyncRedis
from control.redis.connection import optional_text, read, run, run_every, write
from control.replicas.health.overview import Overview, overviews

_decode = msgspec.json.Decoder(list[Overview]).decode


def shared_overviews(client: SyncRedis) -> list[Overview]:
    """As `overviews`, but up to about a second old: one caller in a second reads them, the others take what it wrote.

    Raises RedisUnavailable.
    """
    turn = write("SET", keys.OVERVIEWS_LOCK, "1", "NX", "PX", constants.ROUND_MS, parse=bool)
    mine, written = run_every(client, [turn, read("GET", keys.OVERVIEWS, parse=optional_text)])
    if not mine and written is not None:
        try:
            return _decode(written)
        except msgspec.DecodeError:  # of another version of Furrow
            pass
    found = overviews(client)
    text = msgspec.json.encode(found).decode()
    run(client, write("SET", keys.OVERVIEWS, text, "PX", constants.OVERVIEWS_MS, parse=bool))
    return found
