"""The life of a request in Redis: enqueue, claim, emit, follow, and the ways it can end."""

from __future__ import annotations

from control.requests.claim import ANY_TOKENS, Claimed, Claims, claim, takeover
from control.requests.dead import DeadLetter, dead_letter, dead_letters, drop_letter, retry_letter
from control.requests.emit import Emission, EmitResult, emit
from control.requests.ending import bury, cancel, expire, requeue
from control.requests.enqueue import Enqueue, Enqueued, enqueue
from control.requests.follow import Followed, follow, position, read_log, read_logs, unfollow
from control.requests.listing import OpenRequest, cancel_any, open_requests
from control.requests.orphans import gone_apis, reap
from control.requests.repair import Repaired, repair
from control.requests.suspects import note_suspects, read_suspects

__all__ = [
    "ANY_TOKENS",
    "Claimed",
    "Claims",
    "DeadLetter",
    "Emission",
    "EmitResult",
    "Enqueue",
    "Enqueued",
    "Followed",
    "OpenRequest",
    "Repaired",
    "bury",
    "cancel",
    "cancel_any",
    "claim",
    "dead_letter",
    "dead_letters",
    "drop_letter",
    "emit",
    "enqueue",
    "expire",
    "follow",
    "gone_apis",
    "note_suspects",
    "open_requests",
    "position",
    "read_log",
    "read_logs",
    "read_suspects",
    "reap",
    "repair",
    "requeue",
    "retry_letter",
    "takeover",
    "unfollow",
]
