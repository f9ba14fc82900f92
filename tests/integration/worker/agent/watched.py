"""A replica under the failure detector, whose heartbeats a test writes."""

from __future__ import annotations

import os
import queue

import psutil

from control.messages import Assignment, ModelSpec
from control.replicas.health import Beat, beat, write_poison
from control.replicas.lease import Lease
from tests.integration.worker.conftest import MODEL, REPLICA, ReplicaRedis
from tests.waiting import until
from worker.agent.failure_detector import FailureDetector
from worker.agent.host_replicas import read_host
from worker.agent.replica import Exit, ReplicaProcesses
from worker.agent.supervision.client import SupervisorClient
from worker.agent.supervision.wire import AT_ONCE

WORLD = 2


def sleeps(pid: int) -> bool:
    """True once a process has become the program `sleep` and waits."""
    process = psutil.Process(pid)
    return process.name() == "sleep" and process.status() == psutil.STATUS_SLEEPING


class Watched:
    """A replica of two processes that only sleep; their heartbeats are the test's."""

    def __init__(self, redis: ReplicaRedis, supervisor: SupervisorClient) -> None:
        self.redis = redis
        assignment = Assignment(
            spec=ModelSpec(name=MODEL, source="/nowhere", tp=WORLD),
            replica=REPLICA,
            ranks=[0, 1],
            devices=["cpu", "cpu"],
        )
        exits: queue.SimpleQueue[Exit] = queue.SimpleQueue()
        self.replica = ReplicaProcesses(assignment, "/nowhere", "host", redis.url, supervisor, exits)
        for rank in range(WORLD):
            self.replica.processes[rank] = supervisor.spawn(["sleep", "60"], dict(os.environ), {}, AT_ONCE)
        # A process that still starts runs between two looks, and is spared.
        until(lambda: all(sleeps(process.pid) for process in self.replica.processes.values()))
        self._told: set[int] = set()
        self._kill, self.replica.kill = self.replica.kill, self._record  # type: ignore[method-assign]
        self.detector = FailureDetector(redis.client, self.replica)
        self.lease: Lease = redis.lead(WORLD)

    def beats(self, *ranks: int, phase: str = "ready") -> None:
        """Heartbeats of these ranks in the current epoch. They last until `hush`, however slow the machine is."""
        for rank in ranks:
            word = Beat(
                epoch=self.lease.epoch,
                seq=1,
                oldest_pending_ms=0,
                device="cpu",
                memory_bytes=0,
                phase=phase,
                pid=self.replica.processes[rank].pid,
                host="host",
            )
            self.redis.run(beat(MODEL, REPLICA, rank, word))
            self.redis.client.persist(self.redis.keys.heartbeat(rank))

    def hush(self, rank: int) -> None:
        """Its last word lapses."""
        self.redis.client.delete(self.redis.keys.heartbeat(rank))

    def poison(self, kind: str, rank: int) -> None:
        write_poison(self.redis.client, MODEL, REPLICA, self.lease.epoch, rank, kind, "because")

    def look(self) -> None:
        """As the agent does in a tick."""
        _, view = read_host(self.redis.client, "host", {self.replica.place: WORLD})
        self.detector.judge(view.looks[self.replica.place])

    def killed(self) -> list[int]:
        """The ranks that the detector has killed; their processes have ended."""
        for rank in self._told:
            self.replica.processes[rank].wait(40.0)
        return sorted(self._told)

    def _record(self, rank: int, why: str = "") -> None:
        if rank in self.replica.processes:
            self._told.add(rank)
        self._kill(rank, why)
