"""Bringing back a request that Redis has lost, from what this process knows: its parameters and what was delivered."""

from __future__ import annotations

import msgspec

from api.feed import Feed
from control.connection import Call
from control.requests import Enqueued, enqueue


def bring_back(feed: Feed, now_ms: int) -> Call[Enqueued] | None:
    """Enqueue the request again under its own id, the delivered prefix in its log; None if another process must.

    The seed is part of the parameters, so what comes after the prefix is what would have come.
    """
    origin = feed.origin
    if origin is None:
        return None
    deadline_ms = origin.deadline_ms
    if deadline_ms:
        # At least a millisecond: a request whose time has passed ends as expired, by the same rules as any other.
        deadline_ms = max(1, deadline_ms - (now_ms - origin.received_ms))
    return enqueue(msgspec.structs.replace(origin, deadline_ms=deadline_ms, delivered=list(feed.delivered)))
