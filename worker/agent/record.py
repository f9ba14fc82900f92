"""A replica's processes as an agent records them for the next agent of its host."""

from __future__ import annotations

from typing import Any

import msgspec

from control.messages import Assignment
from worker.agent.replica import Failure, ReplicaProcesses


class ReplicaRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of one replica on this host, under the names of `ReplicaProcesses`. Times are of the monotonic clock, which
    all processes of a host share."""

    assignment: Assignment
    folder: str
    attempts: int
    due: float
    served: bool
    drain_by: float | None
    led_at: float | None
    stop_by: float | None
    failed: str | None
    failed_elsewhere: bool
    failures: dict[int, Failure]
    killed: dict[int, str]
    seen: dict[int, int]
    """The epoch in which each process was heard last, by pid; its Watch knows that."""


_RESTORED = [name for name in ReplicaRecord.__struct_fields__ if name not in ("assignment", "folder", "seen")]


def record_of(replica: ReplicaProcesses, seen: dict[int, int]) -> dict[str, Any]:
    """The record as the supervisor stores it."""
    state = {name: getattr(replica, name) for name in ("assignment", "folder", *_RESTORED)}
    return msgspec.to_builtins(ReplicaRecord(**state, seen=seen), str_keys=True)


def read_record(stored: dict[str, Any]) -> ReplicaRecord:
    """Raises msgspec.ValidationError for a record of another version that can't be read."""
    return msgspec.convert(stored, ReplicaRecord, str_keys=True)


def restore(replica: ReplicaProcesses, record: ReplicaRecord) -> None:
    """Go on where an earlier agent was."""
    for name in _RESTORED:
        setattr(replica, name, getattr(record, name))
