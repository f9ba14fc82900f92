"""An agent's records of its replicas are read whole or not at all."""

from __future__ import annotations

import queue
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from control.messages import Assignment, ModelSpec
from worker.agent.host_replicas import ReplicaRecord, adopt_replicas, record_key, record_of
from worker.agent.replica import ReplicaProcesses

ASSIGNMENT = Assignment(spec=ModelSpec(name="m", source="/m"), replica="r0", ranks=[0], devices=["cpu"])
PLACE = ("m", "r0")


class Rank:
    """A rank process that was there, of the supervisor."""

    pid = 7
    tag = {"kind": "rank", "model": "m", "replica": "r0", "rank": 0}
    started = 0.0
    said: list[str] = []

    def __init__(self) -> None:
        self.calls: list[str] = []

    def kill(self) -> None:
        self.calls.append("kill")

    def forget(self) -> None:
        self.calls.append("forget")

    def poll(self) -> None: ...

    def when_ended(self, call: object) -> None: ...


def replica(assignment: Assignment = ASSIGNMENT, folder: str = "/m", **state: Any) -> ReplicaProcesses:
    supervisor: Any = SimpleNamespace()
    return ReplicaProcesses(assignment, folder, "host", "redis://", supervisor, queue.SimpleQueue(), **state)


def adopted(record: dict[str, Any], rank: Rank) -> list[ReplicaProcesses]:
    supervisor: Any = SimpleNamespace(records={record_key(PLACE): record}, inherited=[rank])
    return [one for one, _ in adopt_replicas(supervisor, replica)]


def test_a_replica_that_drains_goes_on_to() -> None:
    rank = Rank()
    [one] = adopted(record_of(replica(drain_by=5.0, served=True), {}), rank)
    assert one.drain_by == 5.0 and one.served and one.processes.keys() == {0} and not rank.calls


@pytest.mark.parametrize("name", sorted(field.name for field in fields(ReplicaRecord)))
def test_a_record_without_a_field_is_unreadable(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its rank ends, for its assignment to start it again. Only what earlier versions did not write may lack."""
    record = record_of(replica(drain_by=5.0), {})
    del record[name]
    rank = Rank()
    there = adopted(record, rank)
    if name in ("loaded_ms", "memory"):
        assert there and not rank.calls
    else:
        assert not there and rank.calls == ["kill", "forget"]
        assert name in capsys.readouterr().out
