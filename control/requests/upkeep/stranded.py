"""Requests of models of which every replica was given up: they end with the cause, because no leader will end them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import structlog

from control.errors import ModelUnavailable
from control.messages import ModelSpec
from control.placement.rollout import in_order
from control.redis.clients import SyncRedis
from control.redis.connection import run_every
from control.replicas import health
from control.replicas.health import Status
from control.requests.upkeep.abandon import abandon

log = structlog.get_logger()

LOOK_EVERY_S = 1.0
UNPLACED_S = 30.0
"""If fewer replicas exist than are wanted, a host that comes back may still take one; requests wait for it so long."""
MOST_A_LOOK = 2_000
"""Requests that are ended in one look: the caller has other duties."""


def given_up(statuses: Mapping[str, Status | None]) -> str | None:
    """Why a model with these replicas can't serve: the first one's cause; None while one may come to serve."""
    replicas = [(name, statuses[name]) for name in in_order(statuses)]
    if not replicas or any(status is None or status.state != "failed" for _, status in replicas):
        return None
    name, status = replicas[0]
    assert status is not None
    others = f" (and {len(replicas) - 1} more)" if len(replicas) > 1 else ""
    return f"replica {name}{others} was given up: {status.detail}"


class StrandedRequests:
    """Looked at in every turn of the placement holder, and of API processes while there is none; asks Redis once a
    second. Any of them may go on with it, and the same work done twice is harmless."""

    def __init__(self, client: SyncRedis) -> None:
        self._client = client
        self._looked = 0.0
        self._since: dict[str, float] = {}
        """When a model was first seen without a replica that may serve."""

    def end(self, specs: Sequence[ModelSpec], replicas: Mapping[str, Sequence[str]]) -> None:
        """End what is open of the models of which all `replicas`, by model, were given up.

        Raises RedisUnavailable.
        """
        now = time.monotonic()
        if now - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        serving = [spec for spec in specs if not spec.unload]
        places = [(spec.name, replica) for spec in serving for replica in replicas.get(spec.name, ())]
        said = dict(zip(places, run_every(self._client, [health.status_of(*place) for place in places]), strict=True))
        causes = {
            spec.name: given_up({replica: said[spec.name, replica] for replica in replicas.get(spec.name, ())})
            for spec in serving
        }
        self._since = {name: self._since.get(name, now) for name, cause in causes.items() if cause is not None}
        for spec in serving:
            cause = causes[spec.name]
            missing = spec.least_replicas > len(replicas.get(spec.name, ()))
            if cause is None or (missing and now - self._since[spec.name] < UNPLACED_S):
                continue
            why = str(ModelUnavailable(spec.name, "failed", cause))
            if ended := abandon(self._client, spec.name, why, "finished", MOST_A_LOOK):
                log.error(
                    "requests of a failed model ended",
                    model=spec.name,
                    requests=ended,
                    error=cause,
                    action="end_requests",
                )
