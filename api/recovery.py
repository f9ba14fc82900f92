"""Bringing back what Redis has lost of a request, from what this process knows: parameters and what was delivered."""

from __future__ import annotations

import msgspec

from api.feed import Feed
from control.connection import Call
from control.requests import Enqueued, Followed, Repaired, enqueue, repair

NO_BOUND = 1 << 40


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
    # It was accepted: however much comes back with it, it is not refused now.
    return enqueue(
        msgspec.structs.replace(
            origin,
            deadline_ms=deadline_ms,
            delivered=feed.entries[:],
            max_queued_requests=NO_BOUND,
            max_queued_tokens=NO_BOUND,
            max_queue_wait_ms=0,
        )
    )


def set_back(feed: Feed, followed: Followed, had: int) -> bool:
    """Whether Redis has less of the request than this process `had` when it asked, or something else."""
    return feed.diverged or int(followed.fields["seq"]) < had


def give_back(feed: Feed, api: str) -> Call[Repaired]:
    """Bring the request's log to what was delivered; its parse raises LogConflict where something else stands."""
    return repair(feed.model, feed.rid, api, feed.tenant, feed.entries[:])
