"""The replicas of one host: their processes, and their state in Redis, which is read in one round trip and reported.

A new agent of a host takes over the processes of the one before, by the records that it left with the supervisor.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from typing import Any

import msgspec
import structlog

from control.messages import Assignment
from control.placement import farm
from control.placement.rollout import Place
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run_every
from control.replicas import health, memory_deaths
from control.replicas.health import AgentState, Look, Status, look_at
from worker.agent.failure_detector import FailureDetector
from worker.agent.replica import Exit, ReplicaProcesses, ReplicaState
from worker.agent.standby import Standby
from worker.agent.supervision.client import SupervisorClient
from worker.repository.download_progress import Downloaded

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HostView:
    """The host's assignments, withdrawn ones included, a look at each replica that was asked for, and those of their
    models whose specification or name Redis has lost."""

    assignments: dict[Place, Assignment]
    looks: dict[Place, Look]
    lost_specs: frozenset[str] = frozenset()


def read_host(
    client: SyncRedis, host_id: str, worlds: Mapping[Place, int], first: Sequence[Call[Any]] = ()
) -> tuple[list[Any], HostView]:
    """The answers to `first`, which are sent before in the same round trip, and the view. `worlds` maps the replicas to
    look at to their numbers of ranks. Raises RedisUnavailable."""
    calls = {place: look_at(*place, ranks) for place, ranks in worlds.items()}
    models = sorted({model for model, _ in worlds})
    presence = [catalog.is_there(model) for model in models]
    rest = iter(run_every(client, [*first, farm.assignments_of(host_id), *chain(*calls.values()), *chain(*presence)]))
    answers = [*islice(rest, len(first))]
    assignments = next(rest)
    looks = {place: Look.of(list(islice(rest, len(parts)))) for place, parts in calls.items()}
    return answers, HostView(
        assignments={(assignment.spec.name, assignment.replica): assignment for assignment in assignments},
        looks=looks,
        lost_specs=frozenset(
            model for model, parts in zip(models, presence, strict=True) if not all(list(islice(rest, len(parts))))
        ),
    )


class Reporter:
    """Writes the status of replicas. Every method raises RedisUnavailable."""

    def __init__(self, client: SyncRedis, host_id: str) -> None:
        self._client = client
        self._host_id = host_id

    def report(
        self,
        model: str,
        replica: str,
        state: AgentState,
        detail: str,
        assignment: Assignment | None = None,
        download: Downloaded | None = None,
    ) -> None:
        """Write the state of a replica; `assignment` tells how many of its ranks this host runs."""
        ranks = len(assignment.ranks) if assignment else 0
        done, total = (download.done, download.total) if download is not None else (0, 0)
        fields = {"host": self._host_id, "tp": ranks, "downloaded_bytes": done, "download_bytes": total}
        health.write_status(self._client, model, replica, state, detail, **fields)

    def repeat_failure(self, assignment: Assignment, why: str, status: Status | None) -> None:
        """Write again that the replica was given up, where Redis lost it: its requests would wait without an end."""
        if status is None or status.state != "failed":
            self.report(assignment.spec.name, assignment.replica, "failed", why, assignment)


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
        self._client = client
        self._redis_url = redis_url
        self._host_id = host_id
        self._supervisor = supervisor
        self._standby = standby
        self._reporter = reporter
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
        for replica, epochs in adopt_replicas(self._supervisor, self._processes):
            self._add(replica).adopt(epochs)
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
            self._supervisor.keep(record_key(place), record_of(replica, self.detectors[place].last_epochs))

    @property
    def alive(self) -> list[ReplicaProcesses]:
        """Those that neither stop nor were given up."""
        return [replica for replica in self.by_place.values() if not replica.stopping and replica.failed is None]

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


PREFIX = "replica "
"""Prefix of the keys under which the supervisor stores the records of replicas."""


@dataclass(kw_only=True)
class ReplicaRecord(ReplicaState):
    seen: dict[int, int]
    """The epoch in which each pid was heard last."""


_STATE = [field.name for field in fields(ReplicaState)]
_ADDED = {"loaded_ms", "memory"}
"""Fields that records of earlier versions lack. Without another field a replica would forget where it was."""


def read_record(stored: Any) -> ReplicaRecord:
    """Raises msgspec.ValidationError for a record of another version that can't be read."""
    record = msgspec.convert(stored, ReplicaRecord, str_keys=True)
    missing = [name for name in _STATE if name not in stored and name not in _ADDED]
    if missing:
        raise msgspec.ValidationError(f"Object missing required field `{missing[0]}`")
    return record


def record_of(replica: ReplicaProcesses, epochs: dict[int, int]) -> dict[str, Any]:
    """The record as the supervisor stores it."""
    record = ReplicaRecord(**{name: getattr(replica, name) for name in _STATE}, seen=epochs)
    return msgspec.to_builtins(record, str_keys=True)


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
            for name in _STATE:
                setattr(replica, name, getattr(record, name))
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
