"""The side thread of a rank: renews the lock, sends heartbeats, detects the end of the epoch, ends a stuck process.

It shares only `Progress` with the main thread and has a Redis client of its own, so it runs while the main thread is
inside a collective. It waits for an unreachable Redis, and that time does not count for the step under way.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import structlog

from control.errors import EpochOver, Fenced, Lost, Poisoned, RedisUnavailable
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run_all
from control.redis.outage import outage
from control.replicas import health
from control.replicas.lease import Lease, close_epoch, renew
from worker.detectors import BEAT_S, OVER_S, OVER_STILL_S
from worker.rank.exit_codes import STUCK
from worker.rank.progress import Progress
from worker.rank.reachability import Reachability
from worker.rank.recent_waits import RecentWaits

log = structlog.get_logger()

WATCH_S = 0.1
"""Interval of the reads of the epoch's poison."""
LOOP = "heartbeat"
"""Name of this loop in log lines about an outage of Redis."""
CLOSE_S = 0.3
"""Between the loss of the lock and the end of its epoch for all ranks, where the leader has not left it by itself."""


class Heartbeat:
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
        at_end: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`at_end` is told, once, why the epoch is over: it gets the main thread out of waits."""
        self._client, self._lease, self._progress = client, lease, progress
        self._model, self._replica, self._epoch = model, replica, epoch
        self._rank, self._world_size, self._device, self._at_end = rank, world_size, device, at_end
        self._over: EpochOver | None = None
        self._over_since = 0.0
        self._closed = False
        self._stop = threading.Event()
        self._next_beat = 0.0
        self._others: dict[int, tuple[int, int]] = {}
        """Progress of the other ranks at the last look, while this one makes none."""
        self._reachability = Reachability()
        self._recent = RecentWaits()
        # A thread begins without its parent's context: model, rank and epoch belong on this one's lines too.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=f"heartbeat-{rank}", daemon=True)
        self._process = psutil.Process()

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)
        outage.goes_on(LOOP)

    def check(self) -> None:
        """Raise the way in which the epoch ended, if it did."""
        if self._over is not None:
            raise self._over

    def _run(self) -> None:
        while not self._stop.wait(WATCH_S):
            try:
                self._turn()
            except EpochOver as over:
                self._end(over)
            except RedisUnavailable as error:  # keep the epoch, and the finished step waits in the main thread
                outage.waits(LOOP, error)
            except Exception:  # a heartbeat that dies would take a healthy epoch with it
                log.exception("heartbeat failed", action="beat")
            self._deadman()

    def _close(self) -> None:
        """A leader without its lock may wait in a collective whose command was lost too: the others must leave."""
        lost = self._lease if isinstance(self._over, Lost) else None
        if lost is not None and not self._closed and time.monotonic() - self._over_since > CLOSE_S:
            run_all(self._client, [close_epoch(lost)])
            self._closed = True

    def _turn(self) -> None:
        """Look for the end of the epoch, and beat when it is time. Raises EpochOver or RedisUnavailable."""
        self._close()
        self._watch()
        if time.monotonic() >= self._next_beat:
            # Each try of a write that the server refuses for now would be retried at this pace too.
            self._beat()
            self._next_beat = time.monotonic() + BEAT_S
            outage.goes_on(LOOP)
        self._progress.excuse(self._reachability.note())

    @property
    def _stuck(self) -> bool:
        """True if the step under way took too long of itself: not while Redis is away, nor when it is just back."""
        return self._lease is not None and self._progress.overdue and self._reachability.steady

    def _beat(self) -> None:
        """Beat, and renew the lock unless a step is overdue: a stuck leader must lose it."""
        self._progress.look()
        if self._lease is not None:
            if not self._progress.suspicious:
                self._others = {}
            elif self._others_moved():
                self._progress.moved()
        stuck = self._stuck
        if stuck and self._over is None:
            self._poison_for_hang()
        gauges = self._progress.gauges
        used, kept = self._progress.kv
        served = self._progress.served
        read_bytes, weight_bytes = gauges.weights_read
        forward_ms, waited_ms = self._recent.add(time.monotonic(), *gauges.waits)
        beat = health.Beat(
            epoch=self._epoch,
            seq=self._progress.seq,
            oldest_pending_ms=self._progress.pending_ms,
            device=self._device,
            memory_bytes=self._process.memory_info().rss,
            phase=self._progress.phase,
            pid=os.getpid(),
            host=os.environ.get("FURROW_HOST_ID", ""),
            kv_used=used,
            kv_kept=kept,
            running=served.running,
            tokens=served.tokens,
            first_tokens=served.first_tokens,
            first_tokens_ms=served.first_tokens_ms,
            read_bytes=read_bytes,
            weight_bytes=weight_bytes,
            progress=gauges.progress,
            stalled_ms=int(1000 * self._progress.stalled_s),
            forward_ms=forward_ms,
            waited_ms=waited_ms,
        )
        calls: list[Call[Any]] = [health.beat(self._model, self._replica, self._rank, beat)]
        if self._lease is not None and self._over is None and not stuck:
            calls.append(renew(self._lease, self._world_size))
        outcomes = run_all(self._client, calls)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        if len(outcomes) > 1 and outcomes[1]:
            log.warning("the lock ran out and was taken again", action="renew")

    def _others_moved(self) -> bool:
        """True if another rank has got on since the last look: this one may only wait for it."""
        if self._world_size == 1:
            return False
        beats = health.heartbeats(self._client, self._model, self._replica, self._world_size)
        known, self._others = (
            self._others,
            {
                rank: (beat.seq, beat.progress)
                for rank, beat in enumerate(beats)
                if rank != self._rank and beat is not None and beat.epoch == self._epoch
            },
        )
        return any(rank in known and known[rank] != how_far for rank, how_far in self._others.items())

    def _watch(self) -> None:
        poison = health.read_poison(self._client, self._model, self._replica)
        if poison is not None and poison.epoch == self._epoch:
            raise Poisoned(poison.kind, poison.message, poison.rank)
        if self._lease is None and health.read_epoch(self._client, self._model, self._replica) > self._epoch:
            raise Fenced("the epoch has moved on")

    def _poison_for_hang(self) -> None:
        """The command under way is overdue: name the rank whose heartbeat has stopped, or nobody (-1) if all beat."""
        beats = health.heartbeats(self._client, self._model, self._replica, self._world_size)
        silent = [rank for rank, beat in enumerate(beats) if beat is None and rank != self._rank]
        culprit = silent[0] if silent else -1
        who = f"rank {culprit} has no heartbeat" if silent else "every rank still beats"
        message = (
            f"the command after {self._progress.seq} has taken {self._progress.pending_ms} ms, and no rank has got on "
            f"with it for {self._progress.stalled_s:.1f} s; {who}"
        )
        log.error("a step is overdue", culprit=culprit, pending_ms=self._progress.pending_ms, action="poison")
        run_all(self._client, [health.poison(self._model, self._replica, self._epoch, culprit, "deadline", message)])

    def _end(self, over: EpochOver) -> None:
        if self._over is None:
            self._over, self._over_since = over, time.monotonic()
            self._at_end(str(over))  # after the line above: who is let go asks `check` why

    def _deadman(self) -> None:
        """A main thread that does not leave an epoch that is over hangs where no exception reaches it."""
        if self._over is None:
            return
        self._progress.look()
        now, since = time.monotonic(), self._over_since
        if now - max(since, self._progress.moved_at) > OVER_STILL_S or now - since > OVER_S:
            log.critical("stuck in an epoch that is over", reason=str(self._over), action="rank_exit")
            os._exit(STUCK)
