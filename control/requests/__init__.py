"""The life of a request in Redis: enqueue, claim, emit, follow, and the ways it can end."""

from __future__ import annotations

from control.requests.claim import ANY_TOKENS, Claimed, Claims, claim, takeover
from control.requests.emit import Emission, EmitResult, emit
from control.requests.ending import bury, cancel, expire, requeue
from control.requests.enqueue import Enqueue, Enqueued, enqueue
from control.requests.follow import Followed, follow, position, read_log, read_logs, unfollow
from control.requests.orphans import gone_apis, reap

__all__ = [
    "ANY_TOKENS",
    "Claimed",
    "Claims",
    "Emission",
    "EmitResult",
    "Enqueue",
    "Enqueued",
    "Followed",
    "bury",
    "cancel",
    "claim",
    "emit",
    "enqueue",
    "expire",
    "follow",
    "gone_apis",
    "position",
    "read_log",
    "read_logs",
    "reap",
    "requeue",
    "takeover",
    "unfollow",
]
