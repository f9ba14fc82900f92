"""The ways a request ends, or goes back, without a token."""

from __future__ import annotations

from typing import Any, cast

from control.connection import Call
from control.keys import ModelKeys
from control.lease import Lease, granted
from control.messages import RequestState
from control.requests.follow import not_found


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


def expire(model: str, rid: str) -> Call[RequestState | None]:
    """End a waiting request whose deadline has passed; its state afterwards, None if it is gone."""
    keys = ModelKeys(model)

    def parse(reply: str | None) -> RequestState | None:
        return cast(RequestState | None, reply)

    return Call("expire", (keys.request(rid),), (keys.base, rid), parse)


def requeue(lease: Lease, rid: str) -> Call[bool]:
    """Give a request back, its log kept; False if it was not this leader's. Raises Lost or Fenced."""
    keys, model = lease.keys, lease.model_keys
    return Call("requeue", (keys.lock, keys.epoch, model.request(rid)), (lease.token, model.base, rid), _done)


def bury(lease: Lease, rid: str, cause: str) -> Call[bool]:
    """End a request as a dead letter: only one that crashed its group alone. Raises Lost or Fenced."""
    keys, model = lease.keys, lease.model_keys
    named = (keys.lock, keys.epoch, model.request(rid), model.dead)
    return Call("bury", named, (lease.token, model.base, rid, cause), _done)


def _done(reply: list[Any]) -> bool:
    return bool(granted(reply)[0])
