"""The agent of one host: runs what the farm assigned to it, notices what died or hangs, and takes its turn at planning.

It never imports torch and never touches a device. Its processes are children of the host's supervisor: the next agent
adopts them when this one dies.
"""

from __future__ import annotations

import os

import msgspec
import psutil
import structlog

from control.errors import RedisUnavailable
from control.messages import Assignment
from control.placement import farm
from control.placement.placement import Host
from control.records import catalog
from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.redis.outage import outage
from control.replicas import health, lease
from worker.agent.adoption import adopt_replicas, adopt_standby, record_key
from worker.agent.planner import Planner
from worker.agent.rank_exits import RankExits
from worker.agent.record import record_of
from worker.agent.replica import ReplicaProcesses
from worker.agent.standby import Standby
from worker.agent.watch import Watch
from worker.health.contact import Contact
from worker.repository.preparation import Preparations
from worker.supervision.client import SupervisorClient

log = structlog.get_logger()

TICK_S = 0.2
LOOP = "agent"
"""Its name where loops say that they wait for Redis."""

Place = tuple[str, str]
"""Model and replica."""


class Agent:
    """One host's agent. `run` returns after `stopping` was set and every rank has ended, or once it is `leaving`."""

    def __init__(
        self,
        client: SyncRedis,
        redis_url: str,
        host: Host,
        supervisor: SupervisorClient,
        standby: Standby | None = None,
    ) -> None:
        self._client, self._redis_url, self._host, self._supervisor = client, redis_url, host, supervisor
        self._replicas: dict[Place, ReplicaProcesses] = {}
        self._preparing = Preparations(client, self._report)
        self._refused: dict[Place, tuple[int, str]] = {}
        """Revisions that no process was started for, and why."""
        self._watches: dict[Place, Watch] = {}
        self._exits = RankExits(client, supervisor, host.id, self._replicas, self._watches, self._report)
        self._standby = standby
        self._contact = Contact()
        self._planner = Planner(client, lambda model, replica, why: self._report(model, replica, "unplaceable", why))
        self.stopping = False
        self.leaving = False
        """Told to make room for another agent, which adopts every process."""

    def run(self) -> None:
        """Adopt what is there, then tick until told to stop; an exit is handled the moment that it is reported."""
        self.adopt()
        log.info("agent ready", host=self._host.id, devices=list(self._host.devices) or ["cpu"], action="agent_start")
        while not self.leaving and (not self.stopping or self._replicas):
            self._supervisor.alive()
            try:
                self.tick()
                self._contact.made()
                outage.goes_on(LOOP)
            except RedisUnavailable as error:
                outage.waits(LOOP, error)
            except Exception:  # the agent must survive what nobody foresaw: it is the one that restarts the others
                log.exception("agent tick failed", action="agent_tick")
            try:
                self._exits.wait(TICK_S)
            except RedisUnavailable as error:  # it is reported when Redis is back
                outage.waits(LOOP, error)
        self._preparing.close()
        if self._standby is not None and not self.leaving:
            self._standby.stop()

    def adopt(self) -> None:
        """Go on with the processes of the agent before this one, if there was any."""
        for replica, seen in adopt_replicas(self._supervisor, self._processes):
            self._replicas[replica.place] = replica
            self._watches[replica.place] = Watch(self._client, replica)
            self._watches[replica.place].adopt(seen)
            self._contact.begin()
        adopt_standby(self._supervisor, self._standby)

    def _processes(self, assignment: Assignment, folder: str) -> ReplicaProcesses:
        host, url = self._host.id, self._redis_url
        return ReplicaProcesses(assignment, folder, host, url, self._supervisor, self._exits.queue, self._standby)

    def _record(self) -> None:
        """Tell the supervisor what the next agent must know."""
        for place, replica in self._replicas.items():
            self._supervisor.keep(record_key(place), record_of(replica, self._watches[place].seen))

    def tick(self) -> None:
        """One turn of the loop. Raises RedisUnavailable."""
        self._exits.tell_late()
        if self.stopping:
            for replica in self._replicas.values():
                replica.stop(host_leaves=True)
        else:
            standby = self._standby.state if self._standby is not None else "off"
            farm.beat_host(self._client, self._host, os.getpid(), psutil.virtual_memory().available, standby)
            # After an absence of Redis the other hosts' heartbeats have lapsed without their fault.
            if farm.hold_placement(self._client, self._host.id) and self._contact.steady:
                self._planner.turn()
            self._reconcile()
        for replica in list(self._replicas.values()):
            self._tend(replica)
        self._record()
        if self._standby is not None:
            self._tend_standby(self._standby)

    # --- assignments to processes -----------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Bring this host's processes in line with its assignments. A missing assignment changes nothing: Redis may
        have lost it, so what runs is published again."""
        held = {(a.spec.name, a.replica): a for a in farm.assignments(self._client, self._host.id)}
        for place, replica in self._replicas.items():
            if place not in held and not replica.stopping:
                again = msgspec.structs.replace(replica.assignment, withdrawn=replica.draining)
                farm.assign(self._client, self._host.id, again)
                catalog.restore_spec(self._client, replica.assignment.spec)
        for place, assignment in held.items():
            replica = self._replicas.get(place)
            if assignment.withdrawn:
                self._refused.pop(place, None)
                self._preparing.leave(place)
                if replica is None:
                    farm.remove_assignment(self._client, self._host.id, *place)
                    health.clear_status(self._client, *place)
                elif assignment.at_once:
                    replica.stop()
                else:
                    self._drain(replica)
            elif replica is not None and assignment.spec.revision == replica.assignment.spec.revision:
                replica.assignment = assignment  # ranks of a host that was lost may have been added
            elif replica is not None and not replica.stopping:
                farm.assign(self._client, self._host.id, replica.assignment)  # an older one runs: it is to be replaced
            elif replica is None and self._refused.get(place, (None, ""))[0] != assignment.spec.revision:
                self._prepare(place, assignment)
            elif replica is None:
                self._repeat_failure(assignment, self._refused[place][1])

    def _prepare(self, place: Place, assignment: Assignment) -> None:
        """Resolve the files and pass the gates off the main thread (a download may take long), then admit it."""
        outcome = self._preparing.turn(place, assignment)
        if isinstance(outcome, str):
            self._refused[place] = assignment.spec.revision, outcome
            self._report(*place, "failed", outcome, assignment)
        elif outcome is not None:
            self._replicas[place] = self._processes(assignment, str(outcome))
            self._watches[place] = Watch(self._client, self._replicas[place])
            self._record()  # before its first process is started
            self._report(*place, "running", "", assignment)

    def _drain(self, replica: ReplicaProcesses) -> None:
        if not replica.draining:
            log.info("replica drains", model=replica.place[0], replica=replica.place[1], action="replica_drain")
            self._report(*replica.place, "draining", "finishes what it runs", replica.assignment)
        replica.drain(led=run(self._client, lease.holder(*replica.place)) is not None)

    def _tend(self, replica: ReplicaProcesses) -> None:
        replica.spawn_missing()
        replica.press()
        if replica.stopping:
            if not replica.processes:
                self._finish(replica)
            return
        if len(replica.assignment.ranks) < replica.assignment.spec.tp:
            self._follow_other_hosts(replica)
        if replica.failed is None:
            self._watches[replica.place].look()
        elif not replica.failed_elsewhere:
            self._repeat_failure(replica.assignment, replica.failed)

    def _tend_standby(self, standby: Standby) -> None:
        """Keep one while anything runs; start it only when no group here is on its way up and wants the processors."""
        running = [r for r in self._replicas.values() if not r.stopping and r.failed is None]
        if not running or self.stopping:
            standby.stop()
            return
        calm = not self._preparing.under_way and all(self._watches[replica.place].whole for replica in running)
        standby.tend(sorted({replica.folder for replica in running}), calm)

    def _finish(self, replica: ReplicaProcesses) -> None:
        """The last process of a stopped replica has ended."""
        del self._replicas[replica.place], self._watches[replica.place]
        self._supervisor.keep(record_key(replica.place), None)
        farm.remove_assignment(self._client, self._host.id, *replica.place)
        health.clear_status(self._client, *replica.place)
        log.info("replica stopped", model=replica.place[0], replica=replica.place[1], action="replica_stop")

    def _follow_other_hosts(self, replica: ReplicaProcesses) -> None:
        """A replica that one of its hosts gave up is given up on all; it starts over where another gets that part."""
        status = run(self._client, health.status_of(*replica.place))
        failed = status is not None and status.state == "failed"
        if failed and replica.failed is None and status is not None and status.host != self._host.id:
            log.error(
                "another host gave the replica up",
                replica=replica.place[1],
                host=status.host,
                error=status.detail,
                action="replica_fail",
            )
            replica.give_up(status.detail, elsewhere=True)
        elif status is not None and not failed and replica.failed_elsewhere:
            replica.start_over()

    def _repeat_failure(self, assignment: Assignment, why: str) -> None:
        """Redis may have lost that the replica was given up, and its requests would wait without an end."""
        place = assignment.spec.name, assignment.replica
        status = run(self._client, health.status_of(*place))
        if status is None or status.state != "failed":
            self._report(*place, "failed", why, assignment)

    def _report(
        self, model: str, replica: str, state: health.AgentState, detail: str, assignment: Assignment | None = None
    ) -> None:
        ranks = len(assignment.ranks) if assignment else 0
        health.write_status(self._client, model, replica, state, detail, host=self._host.id, tp=ranks)
