"""What an agent sees of its ranks through Redis: when they are ready, and when one hangs though its process lives."""

from __future__ import annotations

import time

import structlog

from control import health
from control.clients import SyncRedis
from worker.contact import Contact
from worker.replica import ReplicaProcesses

log = structlog.get_logger()

STUCK_S = 6.0
"""A rank that still beats in an epoch poisoned this long ago is killed: its own deadman has failed."""


class Watch:
    """One replica's heartbeats and poison, looked at in every tick."""

    def __init__(self, client: SyncRedis, replica: ReplicaProcesses, contact: Contact | None = None) -> None:
        """`contact` is the agent's with Redis: while it is not steady nobody's silence means anything."""
        self._client, self._replica, self._contact = client, replica, contact or Contact()
        self._seen: dict[int, int] = {}
        self._poisoned: tuple[int, float] | None = None
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
        if poison is not None and poison.epoch == epoch:
            self._judge(poison, beats)
            return
        self._poisoned = None
        for rank, pid in self._replica.pids().items():
            beat = beats[rank]
            if beat is not None and beat.pid == pid:
                self._seen[pid] = beat.epoch
            elif beat is None and self._seen.get(pid) == epoch and self._contact.steady:
                self._silent(rank, pid, epoch)

    def _silent(self, rank: int, pid: int, epoch: int) -> None:
        """It beat in this epoch, the epoch still stands (so Redis lost nothing), and now it does not: it hangs."""
        model, name = self._replica.place
        message = f"rank {rank} (pid {pid}) lives but has not beaten for {health.HEARTBEAT_S:g} s"
        log.error("a rank hangs", model=model, replica=name, rank=rank, pid=pid)
        health.write_poison(self._client, model, name, epoch, rank, "silent", message)
        del self._seen[pid]
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
