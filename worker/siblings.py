"""The other replicas of a leader's model: which of them is gone, so that its requests may be taken over."""

from __future__ import annotations

import time

from control import catalog
from control.clients import SyncRedis
from control.connection import run_every
from control.lease import Lease, holder

LOOK_EVERY_S = 1.0
GONE_AFTER_S = 5.0
"""A lock that lapsed is back well before this when its agent or its own process mends it."""


class Siblings:
    """Looked at in every turn of a leader; asks Redis once a second, in one round trip. One for each epoch.

    Replicas come and go meanwhile: the ones that are looked at are those that were known at the last look.
    """

    def __init__(self, client: SyncRedis, lease: Lease) -> None:
        self._client, self._model, self._replica = client, lease.model, lease.replica
        self._names: list[str] = []
        self._absent: dict[str, float] = {}
        self._told: set[str] = set()
        self._looked = 0.0

    def gone(self) -> list[str]:
        """The replicas whose lock has been absent for GONE_AFTER_S, each once for as long as it is.

        Raises RedisUnavailable.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return []
        if now - self._looked > 3 * LOOK_EVERY_S:
            self._absent.clear()  # Redis was away, or this leader: nobody could renew, or nobody looked
        looks = [holder(self._model, name) for name in self._names]
        known, *holders = run_every(self._client, [catalog.replicas(self._model), *looks])
        self._looked = time.monotonic()
        gone = []
        for name, token in zip(self._names, holders, strict=True):
            if token is not None:
                self._absent.pop(name, None)
                self._told.discard(name)
            elif now - self._absent.setdefault(name, now) >= GONE_AFTER_S and name not in self._told:
                self._told.add(name)
                gone.append(name)
        self._names = sorted(known.keys() - {self._replica})
        for name in self._absent.keys() - known.keys():
            del self._absent[name]
        return gone
