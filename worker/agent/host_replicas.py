"""The replicas that run on this host: their processes, their failure detectors, and the records of both."""

from __future__ import annotations

import queue
from collections.abc import Mapping

import structlog

from control.messages import Assignment
from control.placement import farm
from control.redis.clients import SyncRedis
from control.replicas import health, memory_deaths
from control.replicas.health import Look, Status
from worker.agent.adoption import adopt_replicas, record_key, record_of
from worker.agent.failure_detector import FailureDetector
from worker.agent.host_view import Place
from worker.agent.replica import Exit, ReplicaProcesses
from worker.agent.reporter import Reporter
from worker.agent.standby import Standby
from worker.agent.supervision.client import SupervisorClient

log = structlog.get_logger()


class HostReplicas:
    """Each replica that has processes here, by model and name, until the last of them has ended."""

    def __init__(
        self,
        client: SyncRedis,
        redis_url: str,
        host_id: str,
        supervisor: SupervisorClient,
        standby: Standby | None,
        reporter: Reporter,
    ) -> None:
        self._client, self._redis_url, self._host_id = client, redis_url, host_id
        self._supervisor, self._standby, self._reporter = supervisor, standby, reporter
        self.by_place: dict[Place, ReplicaProcesses] = {}
        self.detectors: dict[Place, FailureDetector] = {}
        self.exits: queue.SimpleQueue[Exit | None] = queue.SimpleQueue()
        """Exits of rank processes as they are reported, from any thread; None for other news."""
        supervisor.on_said = self.hurry

    def hurry(self) -> None:
        """Have the agent take its next turn now, from any thread: the standby has news, or a model's files are here."""
        self.exits.put(None)

    def adopt(self) -> bool:
        """Go on with the processes of the agent before this one; True if there were any."""
        for replica, seen in adopt_replicas(self._supervisor, self._processes):
            self._add(replica).adopt(seen)
        return bool(self.by_place)

    def start(self, assignment: Assignment, folder: str) -> None:
        """Take a replica in; `tend` starts its processes."""
        self._add(self._processes(assignment, folder))
        self.record()  # before its first process is started
        self._reporter.report(assignment.spec.name, assignment.replica, "running", "", assignment)

    def tend(self, looks: Mapping[Place, Look]) -> None:
        """Start, end and judge processes; forget replicas whose last process has ended."""
        for place, replica in list(self.by_place.items()):
            if not replica.loaded_ms:
                revision = replica.assignment.spec.revision
                replica.loaded_ms = memory_deaths.note_load(self._client, self._host_id, *place, revision)
            replica.spawn_missing()
            replica.press()
            if replica.stopping:
                if not replica.processes:
                    self._finish(replica)
            elif (look := looks.get(place)) is not None:
                replica.saw(look.beats)
                self._judge(replica, look)

    def stop(self) -> None:
        """End every replica: the host leaves the farm."""
        for replica in self.by_place.values():
            replica.stop(host_leaves=True)

    def record(self) -> None:
        """Give the supervisor what the next agent must know."""
        for place, replica in self.by_place.items():
            self._supervisor.keep(record_key(place), record_of(replica, self.detectors[place].seen))

    @property
    def alive(self) -> list[ReplicaProcesses]:
        """Those that neither stop nor were given up."""
        return [one for one in self.by_place.values() if not one.stopping and one.failed is None]

    def _processes(self, assignment: Assignment, folder: str) -> ReplicaProcesses:
        return ReplicaProcesses(
            assignment, folder, self._host_id, self._redis_url, self._supervisor, self.exits, self._standby
        )

    def _add(self, replica: ReplicaProcesses) -> FailureDetector:
        self.by_place[replica.place] = replica
        detector = self.detectors[replica.place] = FailureDetector(self._client, replica)
        return detector

    def _judge(self, replica: ReplicaProcesses, look: Look) -> None:
        if len(replica.assignment.ranks) < replica.assignment.spec.tp:
            self._follow_other_hosts(replica, look.status)
        if replica.failed is None:
            self.detectors[replica.place].judge(look)
        elif not replica.failed_elsewhere:
            self._reporter.repeat_failure(replica.assignment, replica.failed, look.status)

    def _follow_other_hosts(self, replica: ReplicaProcesses, status: Status | None) -> None:
        """A replica that one of its hosts gave up is given up on all; it starts over where another gets that part."""
        if status is None:
            return
        failed = status.state == "failed"
        if failed and replica.failed is None and status.host != self._host_id:
            log.error(
                "another host gave the replica up",
                replica=replica.place[1],
                host=status.host,
                error=status.detail,
                action="replica_fail",
            )
            replica.give_up(status.detail, elsewhere=True)
        elif not failed and replica.failed_elsewhere:
            replica.start_over()

    def _finish(self, replica: ReplicaProcesses) -> None:
        """The last process of a stopped replica has ended."""
        place = replica.place
        del self.by_place[place], self.detectors[place]
        self._supervisor.keep(record_key(place), None)
        farm.remove_assignment(self._client, self._host_id, *place)
        memory_deaths.forget_load(self._client, self._host_id, *place)
        health.clear_status(self._client, *place)
        log.info("replica stopped", model=place[0], replica=place[1], action="replica_stop")
