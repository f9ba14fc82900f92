"""Ranks that hang where no heartbeat of theirs can be missed: between two epochs, or before they join one."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import psutil

from control.replicas.health import Beat
from worker.health.detectors import LATE_S, STOPPED_S
from worker.health.scheduled import times_run


class Absence:
    """From when on each process has been stopped, or late, at every look of its agent."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], float] = {}
        self._run: dict[int, int] = {}
        """How often each stopped process had run at the last look."""

    def forget(self) -> None:
        """Nobody looked for a while: Redis was away, or this process was."""
        self._since.clear()

    def judge(
        self, pids: Mapping[int, int], seen: Mapping[int, int], epoch: int, beats: Sequence[Beat | None]
    ) -> list[tuple[int, str]]:
        """The ranks that hang, each with how. `seen` holds the epoch in which each pid beat last, `beats` the last word
        of each rank."""
        leader = beats[0]
        led = leader is not None and leader.epoch == epoch
        found: list[tuple[int, str]] = []
        for rank, pid in pids.items():
            # A leader that was heard before and is not; a rank that its leader waits for in an epoch it has not joined.
            late = seen.get(pid, 0) > 0 and (leader is None if rank == 0 else led and seen[pid] != epoch)
            if self._lasts("stopped", pid, self._stands(pid)) > STOPPED_S:
                found.append((rank, f"has been stopped for {STOPPED_S:g} s"))
            elif self._lasts("late", pid, late) > LATE_S:
                found.append((rank, f"has not come to an epoch for {LATE_S:g} s"))
        self._since = {key: since for key, since in self._since.items() if key[1] in pids.values()}
        return found

    def _stands(self, pid: int) -> bool:
        """Whether a signal holds the process, and it has not run since the last look."""
        if not _is_stopped(pid):
            self._run.pop(pid, None)
            return False
        now = times_run(pid)
        before, self._run[pid] = self._run.get(pid, now), now
        return before == now

    def _lasts(self, what: str, pid: int, holds: bool) -> float:
        """Seconds for which `what` has held of the process at every look."""
        now = time.monotonic()
        if not holds:
            self._since.pop((what, pid), None)
            return 0.0
        return now - self._since.setdefault((what, pid), now)


def _is_stopped(pid: int) -> bool:
    """Whether a signal holds the process; a debugger's hold does not count."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False
