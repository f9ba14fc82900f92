"""The API processes of a farm: what each asks of Redis once in a while, whatever its clients do."""

from __future__ import annotations

import time

from api.orphans import OrphanReaper
from control import farm
from control.clients import SyncRedis
from control.connection import run_every
from ops.bench.scaling.crowd import Size
from ops.bench.scaling.rounds import Round, watch


def beat_all(client: SyncRedis, size: Size) -> None:
    """Every API process says that it lives."""
    for index in range(size.apis):
        run_every(client, farm.beat_api(f"api-{index}", f"http://api-{index}", int(time.time())))


def rounds(client: SyncRedis, size: Size) -> list[Round]:
    """A heartbeat and a round of reaping of each process, with its look for processes that are gone."""

    def one(index: int, reaper: OrphanReaper) -> None:
        run_every(client, farm.beat_api(f"api-{index}", f"http://api-{index}", int(time.time())))
        reaper.reap()

    found: list[Round] = []
    for index in range(size.apis):
        beat_all(client, size)
        found.append(watch(client, lambda index=index: one(index, OrphanReaper(client))))
    return found
