"""The side thread of a rank: renews the lock, beats with progress, notices the end of the epoch, ends a stuck process.

It shares only `Progress` with the main thread and has a Redis client of its own, so it goes on while the main thread is
inside a collective. A Redis that can't be reached is waited for: it never poisons.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time

import psutil
import structlog

from control import health
from control.clients import SyncRedis
from control.connection import Call, run_all
from control.errors import EpochOver, Fenced, FurrowError, Poisoned
from control.lease import Lease, renew
from worker.exits import STUCK
from worker.progress import Progress

log = structlog.get_logger()

BEAT_S = 0.3
"""A fifth of a heartbeat's life: four may be missed on a busy machine."""
WATCH_S = 0.1
"""How often the poison of the epoch is looked for."""
GRACE_S = 3.0
"""Between the end of an epoch and the end of a main thread that has not left it."""


class Pulse:
    """One epoch's side thread; a context manager around the main thread's work in that epoch."""

    def __init__(
        self,
        client: SyncRedis,
        model: str,
        replica: str,
        epoch: int,
        rank: int,
        world_size: int,
        device: str,
        progress: Progress,
        lease: Lease | None = None,
    ) -> None:
        self._client, self._lease, self._progress = client, lease, progress
        self._model, self._replica, self._epoch = model, replica, epoch
        self._rank, self._world_size, self._device = rank, world_size, device
        self._over: EpochOver | None = None
        self._over_since = 0.0
        self._stop = threading.Event()
        # A thread begins without its parent's context: model, rank and epoch belong on this one's lines too.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=f"pulse-{rank}", daemon=True)
        self._process = psutil.Process()

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def check(self) -> None:
        """Raise the way in which the epoch ended, if it did."""
        if self._over is not None:
            raise self._over

    def _run(self) -> None:
        next_beat = 0.0
        while not self._stop.wait(WATCH_S):
            try:
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + BEAT_S
                    self._beat()
                self._watch()
            except EpochOver as over:
                self._end(over)
            except (
                FurrowError
            ) as error:  # Redis is away: keep the epoch, and the finished step waits in the main thread
                log.warning("pulse could not reach Redis", error=str(error))
            except Exception:  # a pulse that dies would take a healthy epoch with it
                log.exception("the pulse missed a beat")
            self._deadman()

    def _beat(self) -> None:
        """Beat, and renew the lock unless a step is overdue: a stuck leader must lose it."""
        if self._progress.overdue and self._lease is not None and self._over is None:
            self._accuse()
        beat = health.Beat(
            epoch=self._epoch,
            seq=self._progress.seq,
            oldest_pending_ms=self._progress.pending_ms,
            device=self._device,
            memory_bytes=self._process.memory_info().rss,
            phase=self._progress.phase,
            pid=os.getpid(),
            host=os.environ.get("FURROW_HOST_ID", ""),
        )
        calls: list[Call[None]] = [health.beat(self._model, self._replica, self._rank, beat)]
        if self._lease is not None and self._over is None and not self._progress.overdue:
            calls.append(renew(self._lease, self._world_size))
        for outcome in run_all(self._client, calls):
            if isinstance(outcome, Exception):
                raise outcome

    def _watch(self) -> None:
        poison = health.read_poison(self._client, self._model, self._replica)
        if poison is not None and poison.epoch == self._epoch:
            raise Poisoned(poison.kind, poison.message, poison.rank)
        if self._lease is None and health.read_epoch(self._client, self._model, self._replica) > self._epoch:
            raise Fenced("the epoch has moved on")

    def _accuse(self) -> None:
        """The command under way is overdue: name the rank whose pulse has stopped, or nobody (-1) if all beat."""
        beats = health.heartbeats(self._client, self._model, self._replica, self._world_size)
        silent = [rank for rank, beat in enumerate(beats) if beat is None and rank != self._rank]
        culprit = silent[0] if silent else -1
        who = f"rank {culprit} has no heartbeat" if silent else "every rank still beats"
        message = f"step after {self._progress.seq} took over {self._progress.pending_ms} ms; {who}"
        log.error("a step is overdue", culprit=culprit, pending_ms=self._progress.pending_ms)
        run_all(self._client, [health.poison(self._model, self._replica, self._epoch, culprit, "deadline", message)])

    def _end(self, over: EpochOver) -> None:
        if self._over is None:
            self._over, self._over_since = over, time.monotonic()

    def _deadman(self) -> None:
        """A main thread that does not leave an epoch that is over hangs where no exception reaches it."""
        if self._over is not None and time.monotonic() - self._over_since > GRACE_S:
            log.critical("did not leave the epoch in time; ending the process", reason=str(self._over))
            os._exit(STUCK)
