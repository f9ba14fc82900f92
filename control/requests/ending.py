"""The ways a request ends, or goes back, without a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from control.keys import ModelKeys
from control.messages import RequestState
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run_every
from control.replicas.lease import Lease, granted
from control.requests.follow import not_found

EXPIRE_BATCHES = 128
"""Batches of one model's waiting requests that one look expires at most."""


def cancel(model: str, rid: str, tenant: str, cause: str = "cancelled") -> Call[RequestState]:
    """A queued request ends at once, a running one with its leader's next step (then "running" is returned).

    Raises RequestNotFound if it is gone or another tenant's. A request that has ended stays as it ended.
    """
    keys = ModelKeys(model)

    def parse(reply: list[Any]) -> RequestState:
        if reply[0] == "ABSENT":
            raise not_found(rid)
        return reply[1]

    return Call("cancel", (keys.request(rid),), (keys.base, rid, tenant, cause), parse)


def expire(model: str) -> Call[tuple[int, bool]]:
    """End a batch of the waiting requests whose deadline has passed; how many, and whether there are more."""
    keys = ModelKeys(model)

    def parse(reply: list[int]) -> tuple[int, bool]:
        ended, more = reply
        return ended, bool(more)

    return Call("expire", (keys.deadlines,), (keys.base,), parse)


def expire_waiting(client: SyncRedis, models: Sequence[str]) -> dict[str, int]:
    """End the waiting requests whose deadline has passed, which no leader may be there to do; how many, by model.

    At most EXPIRE_BATCHES batches of each model, so that a caller with other duties may go on later. Raises
    RedisUnavailable.
    """
    expired = dict[str, int]()
    pending = list(models)
    for _ in range(EXPIRE_BATCHES):
        outcomes = dict(zip(pending, run_every(client, [expire(model) for model in pending]), strict=True))
        for model, (ended, _) in outcomes.items():
            if ended:
                expired[model] = expired.get(model, 0) + ended
        pending = [model for model, (_, more) in outcomes.items() if more]
    return expired


def requeue(lease: Lease, rid: str) -> Call[bool]:
    """Give a request back, its log kept; False if it was not this leader's. Raises Lost or Fenced."""
    keys = lease.keys
    model = lease.model_keys
    return Call("requeue", (keys.lock, keys.epoch, model.request(rid)), (lease.token, model.base, rid), _done)


def bury(lease: Lease, rid: str, cause: str) -> Call[bool]:
    """End a request as a dead letter: one that crashed its group alone, or that its leader can't read. Raises Lost or
    Fenced."""
    keys = lease.keys
    model = lease.model_keys
    named = (keys.lock, keys.epoch, model.request(rid), model.dead)
    return Call("bury", named, (lease.token, model.base, rid, cause), _done)


def _done(reply: list[Any]) -> bool:
    return bool(granted(reply)[0])
