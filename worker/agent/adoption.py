"""A new agent of a host takes over the processes of the one before, by the records that it left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import structlog

from control.messages import Assignment
from worker.agent.replica import Failure, ReplicaProcesses
from worker.agent.standby import Standby
from worker.agent.supervision.client import SupervisorClient

log = structlog.get_logger()

PREFIX = "replica "
"""Prefix of the keys under which the supervisor stores the records of replicas."""


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
    loaded_ms: int = 0
    memory: dict[int, int] = {}
    seen: dict[int, int]
    """The epoch of the last heartbeat of each process, by pid, for the failure detector."""


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


def record_key(place: tuple[str, str]) -> str:
    """The key of a replica's record."""
    return PREFIX + " ".join(place)


def adopt_replicas(
    supervisor: SupervisorClient, make: Callable[[Assignment, str], ReplicaProcesses]
) -> Iterator[tuple[ReplicaProcesses, dict[int, int]]]:
    """Each replica that was there, with its processes, and the epoch in which each pid was heard last.

    A rank without a readable record ends: its assignment starts it again.
    """
    replicas: dict[str, tuple[ReplicaProcesses, ReplicaRecord]] = {}
    for key, stored in supervisor.records.items():
        if key.startswith(PREFIX):
            try:
                record = read_record(stored)
            except msgspec.ValidationError as error:
                log.error("record of a replica is unreadable", key=key, error=str(error), action="adopt")
                continue
            replica = make(record.assignment, record.folder)
            restore(replica, record)
            replicas[key] = replica, record
    for process in supervisor.inherited:
        tag = process.tag
        if tag.get("kind") not in ("rank", "engine"):
            continue
        pair = replicas.get(record_key((tag["model"], tag["replica"])))
        if pair is None:
            process.kill()
            process.forget()
        else:
            pair[0].adopt(tag["rank"], process)
    for replica, record in replicas.values():
        pids = {rank: process.pid for rank, process in replica.processes.items() if process.poll() is None}
        model, name = replica.place
        log.info("adopted", model=model, replica=name, pids=pids, failed=replica.failed, action="adopt")
        yield replica, record.seen


def adopt_standby(supervisor: SupervisorClient, standby: Standby | None) -> None:
    """Keep the standby process that was there, or end it where none is wanted any more; forget compilers."""
    for process in supervisor.inherited:
        if process.tag.get("kind") == "standby":
            if standby is not None and process.poll() is None:
                standby.adopt(process)
            else:
                process.kill()
                process.forget()
        elif process.tag.get("kind") == "compile":
            process.when_ended(lambda _, process=process: process.forget())
