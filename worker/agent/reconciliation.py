"""Reconciliation: the assignments of a host become processes, and what is withdrawn ends."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import structlog

from control.engines import OWN
from control.host_memory import is_all
from control.messages import Assignment
from control.placement import farm
from control.placement.rollout import Place
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.replicas import health, lease, model_overviews
from control.sizes import in_words
from worker.agent.host_replicas import HostReplicas, HostView, Reporter
from worker.agent.needs import Finder, need_apart
from worker.agent.replica import ReplicaProcesses
from worker.external.host import engine_need
from worker.repository.preparation import Preparations

log = structlog.get_logger()

ASSIGN_PATIENCE_S = 10.0
"""A replica whose memory nobody assigns is started all the same: the agent that plans is of an older version."""
TELL_AFTER_S = 3.0
"""A replica that has just begun to serve has its first requests; the search for a need takes a third of a second of a
processor."""
TELL_EVERY_S = 1.0
"""Between two looks at replicas whose need placement does not know yet."""


class Reconciler:
    """Brings the replicas of one host in line with its assignments, tick by tick."""

    def __init__(
        self,
        client: SyncRedis,
        host_id: str,
        replicas: HostReplicas,
        reporter: Reporter,
        memory: int | None = None,
    ) -> None:
        """`memory`: bytes that the ranks of this host may have together; None: it is not planned."""
        self._client = client
        self._host_id = host_id
        self._replicas = replicas
        self._reporter = reporter
        self._memory, self._needs = memory, Finder(need_apart)
        self._waiting: dict[Place, tuple[int, Path]] = {}
        """Revisions whose files are here, with their folders, and whose memory is not assigned yet."""
        self._reported: dict[Place, str] = {}
        """The status that was reported of those last."""
        self._preparing = Preparations(client, reporter.report, replicas.hurry)
        self._needs_told_at = 0.0
        self._serves_since: dict[tuple[str, int], float] = {}
        """The times at which revisions whose need placement does not know were first seen to serve."""
        self._unassigned_since: dict[Place, float] = {}
        """The times at which placement was told the needs of replicas that wait for their memory."""
        self._assigned: set[Place] = set()
        """The replicas that this host has, withdrawn replicas and those whose ranks still end included."""
        self._refused: dict[Place, tuple[int, str]] = {}
        """Revisions for which no process was started, with the reasons."""

    @property
    def worlds(self) -> dict[Place, int]:
        """The replicas to look at, with their numbers of ranks; a refused one has none."""
        running = {
            place: replica.assignment.spec.group_size
            for place, replica in self._replicas.by_place.items()
            if not replica.stopping
        }
        return dict.fromkeys(self._refused, 0) | running

    @property
    def preparing(self) -> bool:
        """True while files of a model are being resolved."""
        return self._preparing.under_way or bool(self._waiting)

    def close(self) -> None:
        """End the downloads."""
        self._preparing.close()

    def reconcile(self, view: HostView) -> None:
        """One tick. A missing assignment changes nothing: Redis may have lost it, so what runs is published again.

        Raises RedisUnavailable.
        """
        for place, replica in self._replicas.by_place.items():
            if place not in view.assignments and not replica.stopping:
                again = msgspec.structs.replace(replica.assignment, withdrawn=replica.draining)
                farm.assign(self._client, self._host_id, again)
                catalog.restore_spec(self._client, replica.assignment.spec)
        self._assigned = view.assignments.keys() | self._replicas.by_place.keys()
        for place, assignment in view.assignments.items():
            replica = self._replicas.by_place.get(place)
            if assignment.withdrawn:
                self._withdraw(place, assignment, replica)
            elif replica is None:
                self._start(place, assignment, view)
            elif assignment.spec.revision == replica.assignment.spec.revision:
                replica.assignment = assignment  # ranks of a host that was lost may have been added
                if place[0] in view.lost_specs:
                    catalog.restore_spec(self._client, assignment.spec)  # nothing else runs what nobody wants
            elif not replica.stopping:
                farm.assign(self._client, self._host_id, replica.assignment)  # an older one runs: it is to be replaced
        self._tell_needs()

    def _start(self, place: Place, assignment: Assignment, view: HostView) -> None:
        """Resolve the files and pass the gates off the main thread (a download may take long), then take it in."""
        refused, why = self._refused.get(place, (None, ""))
        if refused == assignment.spec.revision:
            if place in view.looks:
                self._reporter.repeat_failure(assignment, why, view.looks[place].status)
            return
        revision, folder = self._waiting.get(place, (None, None))
        outcome = folder if revision == assignment.spec.revision else self._preparing.turn(place, assignment)
        if isinstance(outcome, str):
            self._refused[place] = assignment.spec.revision, outcome
            self._reporter.report(*place, "failed", outcome, assignment)
        elif outcome is not None:
            if self._has_memory(assignment, outcome):
                self._stop_waiting(place)
                self._replicas.start(assignment, str(outcome))
            else:
                self._waiting[place] = assignment.spec.revision, outcome

    def _has_memory(self, assignment: Assignment, folder: Path) -> bool:
        """True if the ranks may start: their memory was assigned and is there, or is not planned. What a model that was
        downloaded needs is told to placement, which assigns it or takes the replica back."""
        if self._memory is None:
            return True
        spec = assignment.spec
        size = sum(assignment.memory)
        if not assignment.memory and self._starts_alone(assignment):
            return True
        if not assignment.memory:
            over, need = self._needs.find(spec, folder) if spec.engine == OWN else (True, engine_need(spec))
            if need is None:
                return over
            run(self._client, farm.put_need(spec.name, need))
            self._tell(assignment, "its memory is being assigned")
            since = self._unassigned_since.setdefault((spec.name, assignment.replica), time.monotonic())
            return time.monotonic() - since > ASSIGN_PATIENCE_S
        used_bytes = sum(sum(replica.assignment.memory) for replica in self._replicas.by_place.values())
        if used_bytes + size <= self._memory:
            return True
        free = in_words(max(0, self._memory - used_bytes))
        self._tell(assignment, f"waits for {in_words(size)} of memory; {free} of this host's are left")
        return False

    def _starts_alone(self, assignment: Assignment) -> bool:
        """True if a replica need not wait for its memory: nothing else is on this host, which plans with all that
        it has. Its ranks take a part of what is free, which is counted once they serve."""
        assert self._memory is not None
        others = [other for other in self._assigned if other != (assignment.spec.name, assignment.replica)]
        return not others and len(assignment.ranks) == assignment.spec.tp and is_all(self._memory)

    def _tell_needs(self) -> None:
        """Tell placement what replicas need that were started before their memory was assigned, once they serve: no
        start is slower for it."""
        if self._memory is None or time.monotonic() < self._needs_told_at + TELL_EVERY_S:
            return
        self._needs_told_at = time.monotonic()
        for replica in self._replicas.by_place.values():
            spec = replica.assignment.spec
            if (
                spec.engine != OWN
                or replica.assignment.memory
                or replica.stopping
                or (spec.devices and "cpu" not in spec.devices)
            ):
                continue
            if not model_overviews.overview(self._client, spec.name).rolled_out:
                continue
            since = self._serves_since.setdefault((spec.name, spec.revision), self._needs_told_at)
            if self._needs_told_at - since >= TELL_AFTER_S:
                _, need = self._needs.find(spec)
                if need is not None:
                    run(self._client, farm.put_need(spec.name, need))

    def _stop_waiting(self, place: Place) -> None:
        self._waiting.pop(place, None)
        self._reported.pop(place, None)
        self._unassigned_since.pop(place, None)

    def _tell(self, assignment: Assignment, why: str) -> None:
        """Report why the ranks of a replica do not start yet, once."""
        place = assignment.spec.name, assignment.replica
        if self._reported.get(place) != why:
            self._reporter.report(*place, "starting", why, assignment)
            self._reported[place] = why

    def _withdraw(self, place: Place, assignment: Assignment, replica: ReplicaProcesses | None) -> None:
        self._refused.pop(place, None)
        self._stop_waiting(place)
        self._preparing.leave(place)
        if replica is None:
            farm.remove_assignment(self._client, self._host_id, *place)
            health.clear_status(self._client, *place)
        elif assignment.at_once:
            replica.stop()
        else:
            self._drain(replica)

    def _drain(self, replica: ReplicaProcesses) -> None:
        model, name = replica.place
        begins = not replica.draining
        if begins:
            log.info("replica drains", model=model, replica=name, action="replica_drain")
            self._reporter.report(model, name, "draining", "finishes what it runs", replica.assignment)
        replica.drain(led=run(self._client, lease.holder(model, name)) is not None)
        if begins:
            run(self._client, catalog.ring(model, "drain"))  # an idle leader looks at its signals when the bell rings
