"""The failure detector of one replica: finds ranks that hang although their processes live, by their heartbeats."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import structlog

from control.redis.clients import SyncRedis
from control.redis.connection import run
from control.replicas import health
from control.replicas.health import Beat
from worker.agent.replica import ReplicaProcesses
from worker.detectors import LATE_S, LOAD_STALL_S, POISON_IGNORED_S, RANK_SILENT_S, STARVED_S, STOPPED_S
from worker.external.engine import ENGINE_LOST, ENGINE_RANK
from worker.rank.reachability import Reachability

log = structlog.get_logger()


def context_switches(pid: int) -> int:
    """The number of times that the main thread of a process has given up a processor; 0 for one that has ended. A
    signal that stops or continues the thread counts too."""
    try:
        switches = psutil.Process(pid).num_ctx_switches()
    except psutil.Error:
        return 0
    return switches.voluntary + switches.involuntary


def wants_to_run(pid: int) -> bool:
    """True if a thread of the process runs, or waits for a processor or a page: then its heartbeat may only be late.

    All threads of a stopped process are stopped; those of one that waits for ever sleep.
    """
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it ended meanwhile
        return False
    return any(stat.rpartition(")")[2].split()[0] in ("R", "D") for stat in stats)


class FailureDetector:
    """Judges one replica in every tick, by its heartbeats and its poison."""

    def __init__(self, client: SyncRedis, replica: ReplicaProcesses) -> None:
        self._client = client
        self._replica = replica
        self._last_epochs: dict[int, int] = {}
        self._poisoned: tuple[int, float] | None = None
        # After a gap Redis was away or slow, or this agent was: silence does not count yet.
        self._reachability = Reachability(grace_s=RANK_SILENT_S)
        self._silent_since: dict[int, float] = {}
        self._run: dict[int, int] = {}
        """The number of times that each process had run at the last look."""
        self._absence = Absence()
        self._engine_stall = EngineStall()

    @property
    def last_epochs(self) -> dict[int, int]:
        """The epoch in which each process of the replica beat last, or served as its engine, by pid."""
        pids = [process.pid for process in self._replica.processes.values()]
        return {pid: self._last_epochs[pid] for pid in pids if pid in self._last_epochs}

    def adopt(self, epochs: dict[int, int]) -> None:
        """Continue from an earlier agent. Its silence may have hidden faults, so every rank gets time for a
        heartbeat."""
        self._last_epochs = dict(epochs)
        self._reachability.start_grace()

    def last_epoch(self, pid: int) -> int:
        """The epoch in which the process beat last; 0 if it never did."""
        return self._last_epochs.get(pid, 0)

    def judge(self, look: health.Look) -> None:
        """Forget failures of a group that is ready; kill ranks that hang. Raises RedisUnavailable."""
        model, name = self._replica.place
        epoch = look.epoch
        beats = look.beats
        poison = look.poison
        if beats[0] is not None and beats[0].phase == "ready" and self._may_be_alive(beats[0]):
            if self._replica.attempts and not self._replica.draining:
                health.write_status(self._client, model, name, "running", "")
            self._replica.ready()
        self._judge_engine(look)
        if self._reachability.note():
            self._absence.forget()
        self._end_absent(epoch, beats)
        if poison is not None and poison.epoch == epoch:
            self._judge_poisoned(poison, beats)
            return
        self._poisoned = None
        before, self._run = self._run, {pid: context_switches(pid) for pid in self._replica.pids().values()}
        for rank, pid in self._replica.pids().items():
            beat = beats[rank]
            if beat is not None and beat.pid == pid:
                self._last_epochs[pid] = beat.epoch
                self._silent_since.pop(pid, None)
            elif beat is None and self._last_epochs.get(pid) == epoch:
                self._silent(rank, pid, epoch, ran=before.get(pid) != self._run[pid])

    def _judge_engine(self, look: health.Look) -> None:
        """Kill an external engine that its leader blames: its next epoch waits for another one. The process that served
        in that epoch is meant, not one that was started since."""
        engine = self._replica.engine
        if engine is None:
            return
        leader = look.beats[0]
        loads = leader is not None and leader.phase == "loading"
        if why := self._engine_stall.judge(engine.pid, loads=loads):
            self._replica.kill(ENGINE_RANK, f"{self._replica.describe(ENGINE_RANK)} (pid {engine.pid}) lives but {why}")
        if leader is not None and leader.phase == "ready":
            self._last_epochs[engine.pid] = leader.epoch
        if not loads:
            return
        for poison in run(self._client, health.poison_history(*self._replica.place))[:1]:
            blamed = poison.rank == ENGINE_RANK and poison.kind in ("deadline", ENGINE_LOST)
            if blamed and self._last_epochs.get(engine.pid) == poison.epoch:
                log.error("engine hangs", model=self._replica.place[0], pid=engine.pid, action="engine_kill")
                self._replica.kill(ENGINE_RANK, poison.message)

    def _may_be_alive(self, leader: Beat) -> bool:
        """False if the leader's last heartbeat is that of a process of this host which has ended since."""
        is_here = 0 in self._replica.assignment.ranks
        return not is_here or self._replica.pids().get(0) == leader.pid

    def _end_absent(self, epoch: int, beats: list[Beat | None]) -> None:
        """Kill ranks that hang and have no heartbeat in this epoch that could be missed."""
        pids = self._replica.pids()
        for rank, reason in self._absence.judge(pids, self._last_epochs, epoch, beats):
            self._end(rank, pids[rank], epoch, f"rank {rank} (pid {pids[rank]}) lives but {reason}")

    def _silent(self, rank: int, pid: int, epoch: int, ran: bool) -> None:
        """It beat in this epoch, the epoch still stands (so Redis lost nothing), and now it does not: it hangs, unless
        it only waits for a processor, or has `ran` since the last look."""
        now = time.monotonic()
        since = self._silent_since.setdefault(pid, now)
        if not self._reachability.steady or (now - since < STARVED_S and (ran or wants_to_run(pid))):
            return
        del self._silent_since[pid]
        reason = f"has not beaten for {RANK_SILENT_S:g} s"
        self._end(rank, pid, epoch, f"rank {rank} (pid {pid}) lives but {reason}")

    def _end(self, rank: int, pid: int, epoch: int, message: str) -> None:
        """The epoch, if it still stands, is over, and so is the process."""
        model, name = self._replica.place
        log.error("rank hangs", model=model, replica=name, rank=rank, pid=pid, message=message, action="rank_kill")
        health.write_poison(self._client, model, name, epoch, rank, "silent", message)
        self._last_epochs.pop(pid, None)
        self._replica.kill(rank, message)

    def _judge_poisoned(self, poison: health.Poison, beats: list[Beat | None]) -> None:
        """Ranks leave a poisoned epoch and stop beating; the one that is blamed, or stays, is killed."""
        if self._poisoned is None or self._poisoned[0] != poison.epoch:
            self._poisoned = (poison.epoch, time.monotonic())
            if poison.kind == "deadline":
                self._replica.kill(poison.rank, poison.message)
        elif time.monotonic() - self._poisoned[1] > POISON_IGNORED_S:
            for rank in self._replica.pids():
                beat = beats[rank]
                if beat is not None and beat.epoch == poison.epoch:
                    log.error(
                        "rank stays in its poisoned epoch",
                        model=self._replica.place[0],
                        rank=rank,
                        action="rank_kill",
                    )
                    self._replica.kill(rank)


class Absence:
    """Ranks that hang where no heartbeat of theirs can be missed: between two epochs, or before they join one.

    It knows since when each process has been stopped, or late, at every look of its agent.
    """

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}
        self._run: dict[int, int] = {}
        """The number of times that each stopped process had run at the last look."""

    def forget(self) -> None:
        """Begin anew after an absence of Redis, or of this process."""
        self._since.clear()

    def judge(
        self, pids: Mapping[int, int], last_epochs: Mapping[int, int], epoch: int, beats: Sequence[Beat | None]
    ) -> list[tuple[int, str]]:
        """The ranks that hang, each with the reason. `last_epochs` has the epoch of the last heartbeat by pid, `beats`
        the last heartbeat of each rank."""
        leader = beats[0]
        led = leader is not None and leader.epoch == epoch
        hanging: list[tuple[int, str]] = []
        for rank, pid in pids.items():
            # A leader that was heard before and is not; a rank that its leader waits for in an epoch it has not joined.
            late = last_epochs.get(pid, 0) > 0 and (leader is None if rank == 0 else led and last_epochs[pid] != epoch)
            if self._lasts("stopped", pid, self._stands(pid)) > STOPPED_S:
                hanging.append((rank, f"has been stopped for {STOPPED_S:g} s"))
            elif self._lasts("late", pid, late) > LATE_S:
                hanging.append((rank, f"has not come to an epoch for {LATE_S:g} s"))
        self._since = {key: since for key, since in self._since.items() if key[1] in pids.values()}
        return hanging

    def _stands(self, pid: int) -> bool:
        """True if a signal holds the process, and it has not run since the last look."""
        if not _is_stopped(pid):
            self._run.pop(pid, None)
            return False
        now = context_switches(pid)
        before, self._run[pid] = self._run.get(pid, now), now
        return before == now

    def _lasts(self, condition: str, pid: int, holds: bool) -> float:
        """Seconds for which `condition` has held of the process at every look."""
        now = time.monotonic()
        if not holds:
            self._since.pop((condition, pid), None)
            return 0.0
        return now - self._since.setdefault((condition, pid), now)


class EngineStall:
    """An external engine that does nothing: a signal holds it, or it loads without using a processor. One that serves
    is judged by its leader."""

    def __init__(self) -> None:
        self._pid = 0
        self._stopped_since = self._still_since = 0.0
        self._busy_s = 0.0
        """Seconds of processors that its processes had used when they were seen to work last."""

    def judge(self, pid: int, *, loads: bool) -> str:
        """The way in which the process hangs, or None; to be called at every look."""
        now = time.monotonic()
        if pid != self._pid:
            self._pid = pid
            self._stopped_since = now
            self._still_since = now
        pids = group_of(pid)
        if not any(map(_is_stopped, pids)):
            self._stopped_since = now
        busy_s = seconds_of(pids) if loads else 0.0
        if not loads or busy_s != self._busy_s:
            self._busy_s = busy_s
            self._still_since = now
        if now - self._stopped_since > STOPPED_S:
            return f"has been stopped for {STOPPED_S:g} s"
        if now - self._still_since > LOAD_STALL_S:
            return f"has used no processor for {LOAD_STALL_S:g} s while its model loads"
        return ""


def group_of(pid: int) -> list[int]:
    """A process and those below it."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def seconds_of(pids: Sequence[int]) -> float:
    """Seconds of processors that processes have used."""
    total = 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def _is_stopped(pid: int) -> bool:
    """True if a signal holds the process; a debugger's hold does not count."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
