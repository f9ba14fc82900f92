"""What an agent sees of its ranks through Redis: when they are ready, and when one hangs though its process lives."""

from __future__ import annotations

import time

import psutil
import structlog

from control import health
from control.clients import SyncRedis
from worker.replica import ReplicaProcesses

log = structlog.get_logger()

STUCK_S = 6.0
"""A rank that still beats in an epoch poisoned this long ago is killed: its own deadman has failed."""

LATE_S = 10.0
"""A rank that was in an earlier epoch and does not come to the next one is killed: it hangs where no epoch's deadline
reaches it. A leader may rest and wait for its lock before; a survivor comes within milliseconds."""
GAP_S = 2.0
"""Looks that are further apart than this saw nothing between them: Redis was away, or this process was."""


class Watch:
    """One replica's heartbeats and poison, looked at in every tick."""

    def __init__(self, client: SyncRedis, replica: ReplicaProcesses) -> None:
        self._client, self._replica = client, replica
        self._seen: dict[int, int] = {}
        self._poisoned: tuple[int, float] | None = None
        self._since: dict[tuple[str, int], float] = {}
        """From when on a process (by pid) has been stopped, or late, at every look."""
        self._looked = 0.0
        self.whole = False
        """Whether the group was ready in its epoch, with all its ranks here, when last looked at."""

    def seen_in(self, pid: int) -> int:
        """The epoch in which the process beat last; 0 if it never did."""
        return self._seen.get(pid, 0)

    def look(self) -> None:
        """Forgive when ready, kill what hangs."""
        model, name = self._replica.place
        epoch = health.read_epoch(self._client, model, name)
        beats = health.heartbeats(self._client, model, name, self._replica.assignment.spec.tp)
        if beats[0] is not None and beats[0].phase == "ready":
            if self._replica.attempts:
                health.write_status(self._client, model, name, "running", "")
            self._replica.ready()
        poison = health.read_poison(self._client, model, name)
        leads = beats[0] is not None and beats[0].phase == "ready" and beats[0].epoch == epoch
        missing = len(self._replica.assignment.ranks) - len(self._replica.processes)
        self.whole = leads and not missing and (poison is None or poison.epoch != epoch)
        self._find_absent(epoch, beats)
        if poison is not None and poison.epoch == epoch:
            self._judge(poison, beats)
            return
        self._poisoned = None
        for rank, pid in self._replica.pids().items():
            beat = beats[rank]
            if beat is not None and beat.pid == pid:
                self._seen[pid] = beat.epoch
            elif beat is None and self._seen.get(pid) == epoch:
                # The epoch still stands, so Redis lost nothing.
                self._silent(rank, pid, epoch, f"has not beaten for {health.HEARTBEAT_S:g} s")

    def _find_absent(self, epoch: int, beats: list[health.Beat | None]) -> None:
        """Kill who is stopped, or hangs between two epochs, where it has no heartbeat that could be missed."""
        now = time.monotonic()
        if now - self._looked > GAP_S:
            self._since.clear()
        self._looked = now
        leader = beats[0]
        led = leader is not None and leader.epoch == epoch
        for rank, pid in self._replica.pids().items():
            # A leader that was heard before and is not; a rank that its leader waits for in an epoch it has not joined.
            was_there = self._seen.get(pid, 0) > 0
            late = was_there and (leader is None if rank == 0 else led and self._seen[pid] != epoch)
            if self._lasts("stopped", pid, _is_stopped(pid), now) > health.HEARTBEAT_S:
                self._silent(rank, pid, epoch, f"has been stopped for {health.HEARTBEAT_S:g} s")
            elif self._lasts("late", pid, late, now) > LATE_S:
                self._silent(rank, pid, epoch, f"has not come to an epoch for {LATE_S:g} s")

    def _lasts(self, what: str, pid: int, holds: bool, now: float) -> float:
        """Seconds for which `what` has held of the process at every look."""
        if not holds:
            self._since.pop((what, pid), None)
            return 0.0
        return now - self._since.setdefault((what, pid), now)

    def _silent(self, rank: int, pid: int, epoch: int, how: str) -> None:
        """Its process lives and hangs: the epoch, if it still stands, is over, and so is the process."""
        model, name = self._replica.place
        message = f"rank {rank} (pid {pid}) lives but {how}"
        log.error("a rank hangs", model=model, replica=name, rank=rank, pid=pid)
        health.write_poison(self._client, model, name, epoch, rank, "silent", message)
        self._seen.pop(pid, None)
        self._since = {key: since for key, since in self._since.items() if key[1] != pid}
        self._replica.kill(rank)

    def _judge(self, poison: health.Poison, beats: list[health.Beat | None]) -> None:
        """Ranks leave a poisoned epoch and stop beating; the one that is accused, or stays, is killed."""
        if self._poisoned is None or self._poisoned[0] != poison.epoch:
            self._poisoned = (poison.epoch, time.monotonic())
            if poison.kind == "deadline":
                self._replica.kill(poison.rank)
        elif time.monotonic() - self._poisoned[1] > STUCK_S:
            for rank in self._replica.pids():
                beat = beats[rank]
                if beat is not None and beat.epoch == poison.epoch:
                    log.error("a rank did not leave its poisoned epoch", model=self._replica.place[0], rank=rank)
                    self._replica.kill(rank)


def _is_stopped(pid: int) -> bool:
    """Whether a signal holds the process; a debugger's hold does not count."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
