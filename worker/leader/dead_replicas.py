"""The other replicas of a leader's model: which of them is gone, so that its requests may be taken over."""

from __future__ import annotations

import time

from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.replicas.health import status_of
from control.replicas.lease import Lease, holder
from worker.detectors import REPLICA_GONE_S

LOOK_EVERY_S = 1.0


class DeadReplicas:
    """The detector of one epoch. It asks Redis once a second, in one round trip, for the replicas known at the last
    look."""

    def __init__(self, client: SyncRedis, lease: Lease) -> None:
        self._client, self._model, self._replica = client, lease.model, lease.replica
        self._names: list[str] = []
        self._absent: dict[str, float] = {}
        self._told: dict[str, bool] = {}
        """The replicas that were returned since they were last led, and whether each had been given up."""
        self._looked = 0.0

    def gone(self) -> list[str]:
        """The replicas whose lock has been absent for REPLICA_GONE_S, or at all if their agent gave them up. Each is
        returned once while it is absent, and once more when it is given up. Raises RedisUnavailable."""
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return []
        if now - self._looked > 3 * LOOK_EVERY_S:
            self._absent.clear()  # Redis was away, or this leader: nobody could renew, or nobody looked
        looks = [call for name in self._names for call in (holder(self._model, name), status_of(self._model, name))]
        known, *found = run_every(self._client, [catalog.replicas(self._model), *looks])
        self._looked = time.monotonic()
        gone = []
        for name, token, status in zip(self._names, found[::2], found[1::2], strict=True):
            if token is not None:
                self._absent.pop(name, None)
                self._told.pop(name, None)
                continue
            given_up = status is not None and status.state == "failed"
            late = now - self._absent.setdefault(name, now) >= REPLICA_GONE_S
            if (late or given_up) and (name not in self._told or given_up > self._told[name]):
                self._told[name] = given_up
                gone.append(name)
        self._names = sorted(known.keys() - {self._replica})
        for name in self._absent.keys() - known.keys():
            del self._absent[name]
        return gone

    def look_again(self, name: str) -> None:
        """Return this replica once more: its requests could not be taken over yet."""
        self._told.pop(name, None)
