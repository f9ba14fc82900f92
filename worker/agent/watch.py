"""What an agent sees of its ranks through Redis: when they are ready, and when one hangs though its process lives."""

from __future__ import annotations

import time
from pathlib import Path

import structlog

from control.redis.clients import SyncRedis
from control.replicas import health
from worker.agent.absence import Absence
from worker.agent.replica import ReplicaProcesses
from worker.health.contact import Contact
from worker.health.detectors import POISON_IGNORED_S, RANK_SILENT_S, STARVED_S
from worker.health.scheduled import times_run

log = structlog.get_logger()


def wants_to_run(pid: int) -> bool:
    """Whether a thread of the process runs, waits for a processor, or for a page: then its pulse may only be starved.

    All threads of a stopped process are stopped, those of one that waits for ever sleep.
    """
    try:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:  # it ended meanwhile
        return False
    return any(stat.rpartition(")")[2].split()[0] in ("R", "D") for stat in stats)


class Watch:
    """One replica's heartbeats and poison, looked at in every tick."""

    def __init__(self, client: SyncRedis, replica: ReplicaProcesses) -> None:
        self._client, self._replica = client, replica
        self._seen: dict[int, int] = {}
        self._poisoned: tuple[int, float] | None = None
        # After a gap Redis was away or slow, or this agent, and nobody's silence counts yet.
        self._contact = Contact(grace_s=RANK_SILENT_S)
        self._silent_since: dict[int, float] = {}
        self._run: dict[int, int] = {}
        """How often each process had run at the last look."""
        self._absence = Absence()
        self.whole = False
        """Whether the group was ready in its epoch, with all its ranks here, when last looked at."""

    @property
    def seen(self) -> dict[int, int]:
        """The epoch in which each process of the replica beat last, by pid."""
        return {pid: self._seen[pid] for pid in self._replica.pids().values() if pid in self._seen}

    def adopt(self, seen: dict[int, int]) -> None:
        """Go on where an earlier agent was. What happened since is not known, so every rank gets time to be heard."""
        self._seen = dict(seen)
        self._contact.begin()

    def seen_in(self, pid: int) -> int:
        """The epoch in which the process beat last; 0 if it never did."""
        return self._seen.get(pid, 0)

    def look(self) -> None:
        """Forgive when ready, kill what hangs."""
        model, name = self._replica.place
        epoch, beats, poison = health.look_at(self._client, model, name, self._replica.assignment.spec.tp)
        if beats[0] is not None and beats[0].phase == "ready" and self._may_be_alive(beats[0]):
            if self._replica.attempts and not self._replica.draining:
                health.write_status(self._client, model, name, "running", "")
            self._replica.ready()
        leads = beats[0] is not None and beats[0].phase == "ready" and beats[0].epoch == epoch
        missing = len(self._replica.assignment.ranks) - len(self._replica.processes)
        self.whole = leads and not missing and (poison is None or poison.epoch != epoch)
        if self._contact.made():
            self._absence.forget()
        self._end_absent(epoch, beats)
        if poison is not None and poison.epoch == epoch:
            self._judge(poison, beats)
            return
        self._poisoned = None
        before, self._run = self._run, {pid: times_run(pid) for pid in self._replica.pids().values()}
        for rank, pid in self._replica.pids().items():
            beat = beats[rank]
            if beat is not None and beat.pid == pid:
                self._seen[pid] = beat.epoch
                self._silent_since.pop(pid, None)
            elif beat is None and self._seen.get(pid) == epoch:
                self._silent(rank, pid, epoch, ran=before.get(pid) != self._run[pid])

    def _may_be_alive(self, leader: health.Beat) -> bool:
        """Whether the leader's last word is not that of a process of this host which has ended since."""
        here = 0 in self._replica.assignment.ranks
        return not here or self._replica.pids().get(0) == leader.pid

    def _end_absent(self, epoch: int, beats: list[health.Beat | None]) -> None:
        """Kill who hangs where it has no heartbeat in this epoch that could be missed."""
        pids = self._replica.pids()
        for rank, how in self._absence.judge(pids, self._seen, epoch, beats):
            self._end(rank, pids[rank], epoch, f"rank {rank} (pid {pids[rank]}) lives but {how}")

    def _silent(self, rank: int, pid: int, epoch: int, ran: bool) -> None:
        """It beat in this epoch, the epoch still stands (so Redis lost nothing), and now it does not: it hangs, unless
        it only waits for a processor, or has `ran` since the last look."""
        now = time.monotonic()
        since = self._silent_since.setdefault(pid, now)
        if not self._contact.steady or (now - since < STARVED_S and (ran or wants_to_run(pid))):
            return
        del self._silent_since[pid]
        how = f"has not beaten for {RANK_SILENT_S:g} s"
        self._end(rank, pid, epoch, f"rank {rank} (pid {pid}) lives but {how}")

    def _end(self, rank: int, pid: int, epoch: int, message: str) -> None:
        """The epoch, if it still stands, is over, and so is the process."""
        model, name = self._replica.place
        log.error("rank hangs", model=model, replica=name, rank=rank, pid=pid, message=message, action="rank_kill")
        health.write_poison(self._client, model, name, epoch, rank, "silent", message)
        self._seen.pop(pid, None)
        self._replica.kill(rank, message)

    def _judge(self, poison: health.Poison, beats: list[health.Beat | None]) -> None:
        """Ranks leave a poisoned epoch and stop beating; the one that is accused, or stays, is killed."""
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
