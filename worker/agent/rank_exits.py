"""The ends of rank processes: the agent tells the farm, and plans the next start or gives up."""

from __future__ import annotations

import queue
import signal
from collections import deque

import psutil
import structlog

from control.control_group import memory_limit
from control.errors import RedisUnavailable
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import health, lease, memory_deaths
from worker.agent.host_replicas import HostReplicas
from worker.agent.memory_kills import OUT_OF_MEMORY, MemoryKills
from worker.agent.replica import DeathNotice, Exit, Failure, ReplicaProcesses
from worker.agent.reporter import Reporter
from worker.agent.supervision.client import SupervisorClient
from worker.rank.exit_codes import REFUSED, STOPPED, describe, poison_kind

log = structlog.get_logger()

KILLS = "memory kills"
"""Key under which the supervisor keeps the count of kills of which no exit has been explained."""


class RankExits:
    """The exits of one host's ranks. The supervisor keeps each one until it was acted on here."""

    def __init__(
        self,
        client: SyncRedis,
        supervisor: SupervisorClient,
        host_id: str,
        replicas: HostReplicas,
        reporter: Reporter,
        kills: MemoryKills | None = None,
    ) -> None:
        self._client, self._supervisor, self._host_id = client, supervisor, host_id
        self._replicas, self._reporter = replicas, reporter
        self._untold: deque[DeathNotice] = deque()
        self._kills = kills or MemoryKills(unclaimed_from=supervisor.records.get(KILLS))

    def tell_late(self) -> None:
        """Tell what could not be told while Redis was away."""
        while self._untold:
            self._tell(self._untold[0])
            self._untold.popleft()

    def wait(self, seconds: float) -> None:
        """Handle the next exit, if one is reported within that time; return at once for other news."""
        self._kills.look()
        self._supervisor.keep(KILLS, self._kills.unclaimed_from)
        try:
            exit = self._replicas.exits.get(timeout=seconds)
        except queue.Empty:
            return
        if exit is not None:
            self._on_exit(exit)

    def _on_exit(self, exit: Exit) -> None:
        """A process ended: plan the next life, and tell the farm at once."""
        replica = self._replicas.by_place.get(exit.place)
        if replica is None or not replica.ended(exit) or exit.pid in replica.outdated:
            self._supervisor.forget(exit.pid)
            return
        killed_for = replica.killed.pop(exit.pid, None)
        what = f"{replica.describe(exit.rank)} (pid {exit.pid}) {describe(exit.status)}"
        is_rank = exit.rank < replica.assignment.spec.group_size
        if replica.draining and is_rank and exit.status == STOPPED:
            replica.stop()  # its leader has finished, and the others with it
        if replica.failed is not None or (replica.stopping and (exit.status == STOPPED or not is_rank)):
            log.info("rank ended", model=exit.place[0], rank=exit.rank, status=what, action="rank_exit")
            self._free_lock(replica, exit)
            self._supervisor.forget(exit.pid)
            return
        log.error(
            "rank died", model=exit.place[0], replica=exit.place[1], rank=exit.rank, status=what, action="rank_exit"
        )
        if killed_for is None and exit.status == -signal.SIGKILL and self._kills.claim():
            killed_for = OUT_OF_MEMORY
        given_up = (is_rank and exit.status == REFUSED) or not replica.pause()
        try:
            # The epoch of now may be a later one than that in which a rank died while there was no agent.
            past = self._replicas.detectors[exit.place].seen_in(exit.pid) if exit.past else None
            epoch = health.read_epoch(self._client, *exit.place) if past is None else past
            self._tell(DeathNotice(exit, what, epoch, given_up, killed_for))
        except RedisUnavailable:  # later the farm may be in another epoch: blame only the one that the process was in
            epoch = self._replicas.detectors[exit.place].seen_in(exit.pid)
            self._untold.append(DeathNotice(exit, what, epoch, given_up, killed_for))
            raise

    def _tell(self, notice: DeathNotice) -> None:
        """Poison the epoch, free a dead leader's lock, and say what happens next. May be repeated."""
        exit, (model, name) = notice.exit, notice.exit.place
        replica, kind = self._replicas.by_place[exit.place], poison_kind(exit.status)
        reason = run(self._client, health.end_reason(model, name, exit.rank, self._host_id, exit.pid))
        words = replica.last_words(exit.rank) if exit.status > 0 else ""  # who is killed says nothing of it
        said = reason or notice.killed_for or words or None
        what = f"{notice.what}: {said}" if said else notice.what
        if said:
            log.error(
                "reason of the rank's end", model=model, replica=name, rank=exit.rank, reason=said, action="rank_exit"
            )
        health.write_poison(self._client, model, name, notice.epoch, exit.rank, kind, what)
        if notice.killed_for == OUT_OF_MEMORY:
            death = memory_deaths.note_death(self._host_id, exit.pid, model, name, exit.rank)
            run_every(self._client, death)
        self._free_lock(replica, exit)
        replica.note(exit.rank, Failure(what, explained=said is not None, outside=kind == "exited"))
        if not notice.given_up:
            state = "draining" if replica.draining else "backoff" if replica.attempts > 1 else "running"
            self._reporter.report(model, name, state, replica.cause, replica.assignment)
        elif exit.status == REFUSED:
            self._give_up(replica, said or what)
        else:
            self._give_up(replica, f"{replica.cause}; tried {replica.attempts} times without being ready")
        if notice.killed_for == OUT_OF_MEMORY:
            self._relieve()
        self._supervisor.forget(exit.pid)

    def _relieve(self) -> None:
        """Give up the replica that came last, where ranks of this host died too often for lack of memory. May be
        repeated: what was given up is no occupant any more, and the count begins anew."""
        calls = [memory_deaths.deaths_of(self._host_id), memory_deaths.server_ms()]
        deaths, now = run_every(self._client, calls)
        occupants = [one.occupant for one in self._replicas.alive if not one.draining]
        youngest = memory_deaths.to_give_up(deaths, occupants, now)
        if youngest is None:
            return
        others = [one for one in occupants if one is not youngest]
        memory = memory_deaths.HostMemory(limit=memory_limit(), total=psutil.virtual_memory().total)
        self._give_up(
            self._replicas.by_place[youngest.place], memory_deaths.why(self._host_id, youngest, others, memory)
        )
        for replica in self._replicas.alive:
            replica.try_anew()
        self._replicas.record()  # before the count is gone: an agent after this one must not count from nothing
        memory_deaths.forget_deaths(self._client, self._host_id)

    def _free_lock(self, replica: ReplicaProcesses, exit: Exit) -> None:
        """Release what a leader that ended held, if nobody leads since."""
        holder = run(self._client, lease.holder(*exit.place)) if exit.rank == 0 else None
        if holder is not None and holder.rpartition(":")[0] == replica.owner(exit.pid):
            run(self._client, lease.release_token(*exit.place, holder))

    def _give_up(self, replica: ReplicaProcesses, why: str) -> None:
        """Failed after back-off: the ranks that are left end, the model answers 503 with this reason."""
        replica.give_up(why)
        self._reporter.report(*replica.place, "failed", why, replica.assignment)
        log.error(
            "gave the replica up", model=replica.place[0], replica=replica.place[1], error=why, action="replica_fail"
        )
