"""The farm's API keys in this process's memory, so that a request needs no read of its own.

Once a second the keys' version is read; if it is another one, the keys in memory are read again, and if it is lower,
Redis has lost changes. While Redis is away known keys work for a while, and unknown ones are refused.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import structlog

from api.http.tasks import PeriodicTask
from control import access
from control.access import ApiKey
from control.errors import RedisUnavailable
from control.redis.batches import Batches

log = structlog.stdlib.get_logger(__name__)

LANE = "api keys"
"""Of all calls about keys, which belong to no model; no model's name has a space."""
LOOK_EVERY_S = 1.0
STALE_S = 3.0
"""Without a look for so long, what is in memory is no longer taken to be true."""
AWAY_S = 600.0
"""Seconds for which a known key works while Redis is away."""
FORGET_S = 60.0
"""Read again after so long, whatever the number says: a change may have been cut off before it was counted."""
MOST = 10_000
"""Ids kept in memory, unknown ones included; the one that was not asked for the longest goes first."""
NOTE_USED_S = 60.0


@dataclass(slots=True)
class _Known:
    key: ApiKey | None
    at: float
    """Monotonic time at which it was read."""


class Keyring:
    """Owns what is in memory. Without `start` every look-up asks Redis."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._version = -1
        self._looked_at = float("-inf")
        self._away: RedisUnavailable | None = None
        self._used: set[str] = set()
        self._noted: dict[str, float] = {}
        self._task = PeriodicTask("read_keys", self._keep_looking, LOOK_EVERY_S)

    def start(self) -> None:
        self._task.start()

    async def stop(self) -> None:
        await self._task.stop()

    async def find(self, key_id: str) -> ApiKey | None:
        """The key of an id, whatever its state. Raises RedisUnavailable where only Redis could tell."""
        entry = self._known.get(key_id)
        now = time.monotonic()
        fresh = now - self._looked_at < STALE_S
        if entry is not None and fresh and now - entry.at < FORGET_S:
            self._known.move_to_end(key_id)
            return entry.key
        if self._away is not None:
            return self._while_away(entry, now, self._away)
        try:
            return await self._read(key_id)
        except RedisUnavailable as error:
            return self._while_away(entry, now, error)

    def used(self, key_id: str) -> None:
        """A request came with this key; when that was is written down now and then."""
        self._used.add(key_id)

    async def look(self) -> None:
        """Learn what has changed. Raises RedisUnavailable."""
        version = await self._batches.run(LANE, access.version())
        if version < self._version:
            await self._bring_back()
            version = await self._batches.run(LANE, access.version())
        if version != self._version:
            # Reads from here on include all changes up to this number; the next look finds later ones.
            self._version = version
            await self._read_again(list(self._known))
        await self._read_again(self._growing_old())
        self._looked_at = time.monotonic()
        self._away = None
        await self._note_used()

    async def _read(self, key_id: str) -> ApiKey | None:
        while True:
            version = self._version
            key = await self._batches.run(LANE, access.get(key_id))
            if version == self._version:
                # Else a change was found meanwhile, perhaps of this very key.
                self._keep({key_id: key}.items())
                return key

    def _growing_old(self) -> list[str]:
        """Keys in use that are read again here, so that no request has to wait for it."""
        now = time.monotonic()
        return [
            key_id for key_id in self._used if key_id in self._known and now - self._known[key_id].at > FORGET_S / 2
        ]

    async def _read_again(self, ids: list[str]) -> None:
        try:
            keys_read = await self._batches.run_every(LANE, [access.get(key_id) for key_id in ids])
        except Exception:
            self._version = -1  # the next look reads them again
            raise
        self._keep(zip(ids, keys_read, strict=True))

    def _keep(self, keys_read: Iterable[tuple[str, ApiKey | None]]) -> None:
        now = time.monotonic()
        for key_id, key in keys_read:
            self._known[key_id] = _Known(key, now)
        while len(self._known) > MOST:
            self._known.popitem(last=False)

    def _while_away(self, entry: _Known | None, now: float, error: RedisUnavailable) -> ApiKey | None:
        if entry is None or entry.key is None or now - entry.at > AWAY_S + FORGET_S:
            raise error
        return entry.key

    async def _bring_back(self) -> None:
        """Write back the keys in memory that Redis lacks, after it has lost changes or everything."""
        lost = [entry.key for entry in self._known.values() if entry.key is not None]
        log.warning("Redis has lost API keys; those known here are written back", action="restore_keys", keys=len(lost))
        for key in lost:
            await self._batches.run_every(LANE, access.restore(key))

    async def _note_used(self) -> None:
        now = time.monotonic()
        due = [key_id for key_id in self._used if now - self._noted.get(key_id, float("-inf")) >= NOTE_USED_S]
        self._used.difference_update(due)
        self._noted = {key_id: at for key_id, at in self._noted.items() if now - at < NOTE_USED_S}
        self._noted.update(dict.fromkeys(due, now))
        await self._batches.run_all(LANE, [access.note_used(key_id, int(time.time())) for key_id in due])

    async def _keep_looking(self) -> None:
        try:
            await self.look()
        except RedisUnavailable as error:
            self._away = error
            raise
