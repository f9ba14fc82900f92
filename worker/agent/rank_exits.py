"""The ends of rank processes: the agent tells the farm, and plans the next start or gives up."""

from __future__ import annotations

import queue
import re
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import structlog

from control.control_group import memory_limit
from control.errors import RedisUnavailable
from control.redis.clients import SyncRedis
from control.redis.connection import run, run_every
from control.replicas import health, lease, memory_deaths
from worker.agent.host_replicas import HostReplicas, Reporter
from worker.agent.replica import DeathNotice, Exit, Failure, ReplicaProcesses
from worker.agent.supervision.client import SupervisorClient
from worker.rank.exit_codes import REFUSED, STOPPED, describe, poison_kind

log = structlog.get_logger()


# The kernel's count of processes that it killed for lack of memory, in this process's control group or else on this
# machine.


RECENT_S = 30.0
"""Between a kill and the end of its process, whose memory is given back meanwhile."""
OUT_OF_MEMORY = (
    "the kernel ended it for lack of memory (oom_kill of its control group rose); give the host or container more "
    "memory, or load the model with --quant or fewer --kv-tokens"
)

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_MACHINE = Path("/proc/vmstat")
_COUNT = re.compile(rb"^oom_kill (\d{1,18})$", re.MULTILINE)


class MemoryKills:
    """Kills since its start. A child's end by SIGKILL claims one; where there is no count, there is none to claim. The
    kernel's count has the group's processes that it killed for the group's limit and for want of memory of the machine;
    outside of a group those of the whole machine are counted."""

    def __init__(
        self,
        groups: Path = _GROUPS,
        own_group: Path = _OWN_GROUP,
        clock: Callable[[], float] = time.monotonic,
        *,
        machine: Path = _MACHINE,
        unclaimed_from: int | None = None,
    ) -> None:
        """`unclaimed_from` is that of an earlier process on this host: kills since then can be claimed too."""
        # One file for good: the machine's count is another number, and not to be taken where the group's is away.
        self._file = next((file for file in (*_files(groups, own_group), machine) if _kills(file) is not None), None)
        self._clock = clock
        self._counted = 0
        now = self._count()
        self._counted = now if unclaimed_from is None or unclaimed_from > now else unclaimed_from
        self._kills: list[float] = []
        """The times at which kills were seen that nothing claimed."""

    @property
    def unclaimed_from(self) -> int:
        """The count before the kills that nothing has claimed yet."""
        return self._counted - len(self._kills)

    def look(self) -> None:
        """Read the count. Call now and then: a kill of another process is not claimed long after."""
        now = self._clock()
        count = self._count()
        self._kills = [at for at in self._kills if at > now - RECENT_S]
        self._kills += [now] * min(count - self._counted, 100)
        self._counted = count

    def claim(self) -> bool:
        """True if one happened of late that no other end was explained with."""
        self.look()
        if not self._kills:
            return False
        self._kills.pop(0)
        return True

    def _count(self) -> int:
        count = None if self._file is None else _kills(self._file)
        return self._counted if count is None else count


def _kills(file: Path) -> int | None:
    """The count in a file; None where there is none."""
    with suppress(OSError):
        if match := _COUNT.search(file.read_bytes()):
            return int(match[1])
    return None


def _files(groups: Path, own_group: Path) -> Iterator[Path]:
    """The files that may have the count, of version 2 and of version 1 of control groups."""
    with suppress(OSError, ValueError):
        for line in own_group.read_text(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            root = groups
            name = "memory.events"
            if controllers:
                root = groups / "memory"
                name = "memory.oom_control"
            if not controllers or "memory" in controllers.split(","):
                # In a container the path may be the host's, of which only the root is visible.
                yield from (root / path.lstrip("/") / name, root / name)


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
    ) -> None:
        self._client = client
        self._supervisor = supervisor
        self._host_id = host_id
        self._replicas = replicas
        self._reporter = reporter
        self._untold: deque[DeathNotice] = deque()
        self._kills = MemoryKills(unclaimed_from=supervisor.records.get(KILLS))

    def tell_late(self) -> None:
        """Write the exits that could not be written while Redis was away."""
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
        exit_text = f"{replica.describe(exit.rank)} (pid {exit.pid}) {describe(exit.status)}"
        is_rank = exit.rank < replica.assignment.spec.group_size
        if replica.draining and is_rank and exit.status == STOPPED:
            replica.stop()  # its leader has finished, and the others with it
        if replica.failed is not None or (replica.stopping and (exit.status == STOPPED or not is_rank)):
            log.info("rank ended", model=exit.place[0], rank=exit.rank, status=exit_text, action="rank_exit")
            self._free_lock(replica, exit)
            self._supervisor.forget(exit.pid)
            return
        log.error(
            "rank died",
            model=exit.place[0],
            replica=exit.place[1],
            rank=exit.rank,
            status=exit_text,
            action="rank_exit",
        )
        if killed_for is None and exit.status == -signal.SIGKILL and self._kills.claim():
            killed_for = OUT_OF_MEMORY
        given_up = (is_rank and exit.status == REFUSED) or not replica.pause()
        try:
            # The epoch of now may be a later one than that in which a rank died while there was no agent.
            past = self._replicas.detectors[exit.place].last_epoch(exit.pid) if exit.past else None
            epoch = health.read_epoch(self._client, *exit.place) if past is None else past
            self._tell(DeathNotice(exit, exit_text, epoch, given_up, killed_for))
        except RedisUnavailable:  # later the farm may be in another epoch: blame only the one that the process was in
            epoch = self._replicas.detectors[exit.place].last_epoch(exit.pid)
            self._untold.append(DeathNotice(exit, exit_text, epoch, given_up, killed_for))
            raise

    def _tell(self, notice: DeathNotice) -> None:
        """Poison the epoch, free a dead leader's lock, and say what happens next. May be repeated."""
        exit, (model, name) = notice.exit, notice.exit.place
        replica = self._replicas.by_place[exit.place]
        kind = poison_kind(exit.status)
        reason = run(self._client, health.end_reason(model, name, exit.rank, self._host_id, exit.pid))
        words = replica.last_words(exit.rank) if exit.status > 0 else ""  # who is killed says nothing of it
        last_words = reason or notice.killed_for or words or None
        message = f"{notice.what}: {last_words}" if last_words else notice.what
        if last_words:
            log.error(
                "reason of the rank's end",
                model=model,
                replica=name,
                rank=exit.rank,
                reason=last_words,
                action="rank_exit",
            )
        health.write_poison(self._client, model, name, notice.epoch, exit.rank, kind, message)
        if notice.killed_for == OUT_OF_MEMORY:
            death = memory_deaths.note_death(self._host_id, exit.pid, model, name, exit.rank)
            run_every(self._client, death)
        self._free_lock(replica, exit)
        replica.note(exit.rank, Failure(message, explained=last_words is not None, outside=kind == "exited"))
        if not notice.given_up:
            state = "draining" if replica.draining else "backoff" if replica.attempts > 1 else "running"
            self._reporter.report(model, name, state, replica.cause, replica.assignment)
        elif exit.status == REFUSED:
            self._give_up(replica, last_words or message)
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
        occupants = [replica.occupant for replica in self._replicas.alive if not replica.draining]
        youngest = memory_deaths.to_give_up(deaths, occupants, now)
        if youngest is None:
            return
        others = [occupant for occupant in occupants if occupant is not youngest]
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
