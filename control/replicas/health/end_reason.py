"""The error message with which a rank process ended; its agent sees no more than an exit status."""

from __future__ import annotations

import msgspec

from control.constants import END_REASON_MS
from control.keys import ReplicaKeys
from control.redis.connection import Call, read


class EndReason(msgspec.Struct, frozen=True):
    """`host` and `pid` name the process, because a later one may have the same rank."""

    host: str
    pid: int
    message: str


def note_end(model: str, replica: str, rank: int, reason: EndReason) -> list[Call[int]]:
    """Store the reason before the process exits; the calls may be repeated."""
    key = ReplicaKeys(model, replica).ends
    text = msgspec.json.encode(reason).decode()
    return [read("HSET", key, str(rank), text, parse=int), read("PEXPIRE", key, END_REASON_MS, parse=int)]


def end_reason(model: str, replica: str, rank: int, host: str, pid: int) -> Call[str | None]:
    """The message that the process stored, or None."""

    def parse(reply: str | None) -> str | None:
        reason = msgspec.json.decode(reply, type=EndReason) if reply else None
        return reason.message if reason is not None and (reason.host, reason.pid) == (host, pid) else None

    return read("HGET", ReplicaKeys(model, replica).ends, str(rank), parse=parse)
