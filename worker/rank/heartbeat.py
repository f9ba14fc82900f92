"""The side thread of a rank, and the progress of the main thread that it reports.

The thread renews the lock, sends heartbeats, detects the end of the epoch and ends a stuck process. It renews, and not
the script that emits, because a load, a long step or a pause needs it anyway, and one place decides when a stuck leader
loses its lock.

It shares only `Progress` with the main thread and has a Redis client of its own, so it runs while the main thread is
inside a collective. It waits for an unreachable Redis, and that time does not count for the step under way.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import psutil
import structlog

from control.errors import EpochOver, Fenced, Lost, Poisoned, RedisUnavailable
from control.redis.clients import SyncRedis
from control.redis.connection import Call, run_all
from control.redis.outage import outage
from control.replicas import health
from control.replicas.lease import Lease, close_epoch, renew
from worker.detectors import BEAT_S, OVER_S, OVER_STILL_S, PER_TOKEN_S, STEP_FACTOR, STEP_FLOOR_S, UNKNOWN_STEP_S
from worker.rank import series
from worker.rank.counters import Counters
from worker.rank.exit_codes import STUCK
from worker.rank.reachability import Reachability

Phase = Literal["starting", "forming", "loading", "ready"]

LEARN_EVERY = 20
"""Steps between two computations of the p99, and before the first one."""


@dataclass(frozen=True, slots=True)
class ServedCounts:
    """Requests that run; tokens, first tokens, and the sum of the times to these, since the counters began."""

    running: int = 0
    tokens: int = 0
    first_tokens: int = 0
    first_tokens_ms: int = 0


@dataclass
class Deadlines:
    """The time for which a step may show no progress: max(2 s, 10 × p99 of the epoch's steps) plus time for prompt
    tokens."""

    _decode_s: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    _observed: int = 0
    _p99_s: float | None = None
    """The p99 at its last computation."""

    def observe(self, seconds: float, prompt_tokens: int) -> None:
        """Record a finished step; only steps without prompt tokens teach, the others vary with their size."""
        if not prompt_tokens:
            self._decode_s.append(seconds)
            self._observed += 1
            if self._observed % LEARN_EVERY == 0:
                self._p99_s = sorted(self._decode_s)[int(len(self._decode_s) * 0.99)]

    def step(self, prompt_tokens: int) -> float:
        """Seconds between two signs of progress in a step which feeds `prompt_tokens`."""
        if self._p99_s is None:
            return UNKNOWN_STEP_S + PER_TOKEN_S * prompt_tokens
        return max(STEP_FLOOR_S, STEP_FACTOR * self._p99_s) + PER_TOKEN_S * prompt_tokens


class Gauges(Protocol):
    """The figures that a rank's worker shows, for any thread."""

    @property
    def progress(self) -> int:
        """A number that changes as the main thread makes progress in a command."""
        ...

    @property
    def weights_read(self) -> tuple[int, int]:
        """Bytes of the checkpoint that were read, and all of them."""
        ...

    @property
    def waits(self) -> tuple[float, float]:
        """Seconds of this epoch's forwards, and those of them in which this rank waited for others."""
        ...


class Share(Protocol):
    """A setting of the replica that its leader reads with each beat."""

    @property
    def reading(self) -> Call[Any]: ...

    def take(self, answer: Any, /) -> None: ...


@dataclass(slots=True)
class NoGauges:
    """Of a rank that does nothing."""

    progress: int = 0
    weights_read: tuple[int, int] = (0, 0)
    waits: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Command:
    began: float
    deadline_s: float
    moved: Callable[[], None]


class Progress:
    """Written by the main thread, read by the heartbeat; each field is assigned atomically, so no lock is needed."""

    def __init__(self, gauges: Gauges | None = None, counters: Counters | None = None) -> None:
        """`counters` get the seconds of each command, and what the waits grew by."""
        self.gauges: Gauges = gauges or NoGauges()
        self._counters = counters or Counters()
        self._waits_before = (0.0, 0.0)
        self.phase: Phase = "starting"
        self.seq = 0
        self.kv: tuple[int, int] = (0, 0)
        """Tokens of KV memory in use and kept; only a leader knows them."""
        self.kv_limit = 0
        """The most that may be in use and kept together, on every rank; only a leader knows it."""
        self._pending: _Command | None = None
        self._last_count = 0
        self.moved_at = 0.0
        """Time of the main thread's last progress."""
        self._since: tuple[_Command, float] | None = None
        """The command under way, and since when it stands still, where that is not since its beginning."""

    def begin(self, deadline_s: float, moved: Callable[[], None] = lambda: None) -> None:
        """Start a command, which must show progress every `deadline_s` seconds until it ends. The side thread calls
        `moved` at each progress."""
        self._pending = _Command(time.monotonic(), deadline_s, moved)

    def look(self) -> None:
        """Note whether the main thread has made progress since the last look. For the heartbeat alone."""
        count = self.gauges.progress
        if count != self._last_count:
            self._last_count = count
            self.moved_at = time.monotonic()
            self.moved()

    def moved(self) -> None:
        """Note that the running command has made progress, on this rank or on another one. For the heartbeat alone."""
        pending = self._pending
        if pending is not None:
            self._since = (pending, time.monotonic())
            pending.moved()

    def excuse(self, seconds: float) -> None:
        """Subtract an outage of Redis of `seconds`, until now, from the command under way. For the heartbeat alone."""
        pending = self._pending
        if pending is not None:
            self._since = (pending, min(time.monotonic(), self._still_since(pending) + seconds))

    def end(self, seq: int) -> float:
        """It ended, as command `seq`; returns the seconds that it took."""
        started = self._pending.began if self._pending else time.monotonic()
        self._pending = None
        self.seq = seq
        seconds = time.monotonic() - started
        forward_before, waited_before = self._waits_before
        forward_s, waited_s = self._waits_before = self.gauges.waits
        self._counters.command(seconds, max(0.0, forward_s - forward_before), max(0.0, waited_s - waited_before))
        return seconds

    @property
    def served(self) -> ServedCounts:
        """The counts of requests; only a leader has any."""
        *firsts, seconds = self._counters.read(series.TO_FIRST_TOKEN)
        return ServedCounts(
            running=int(self._counters.read(series.RUNNING)[0]),
            tokens=int(self._counters.read(series.GENERATION_TOKENS)[0]),
            first_tokens=int(sum(firsts)),
            first_tokens_ms=int(1000 * seconds),
        )

    def idle(self) -> None:
        self._pending = None

    def _still_since(self, pending: _Command) -> float:
        return self._since[1] if self._since is not None and self._since[0] is pending else pending.began

    @property
    def pending_ms(self) -> int:
        """Age of what is under way, 0 if nothing is."""
        pending = self._pending
        return int((time.monotonic() - pending.began) * 1000) if pending else 0

    @property
    def stalled_s(self) -> float:
        """Seconds for which the running command has made no progress; 0 without a command."""
        pending = self._pending
        return time.monotonic() - self._still_since(pending) if pending else 0.0

    @property
    def suspicious(self) -> bool:
        """True if half of the time is over in which progress must show."""
        pending = self._pending
        return pending is not None and time.monotonic() - self._still_since(pending) > pending.deadline_s / 2

    @property
    def overdue(self) -> bool:
        """True if the command under way has shown no progress for longer than it may."""
        pending = self._pending
        return pending is not None and time.monotonic() - self._still_since(pending) > pending.deadline_s


RECENT_S = 5.0
"""Long enough that a busy processor, which delays every rank now and then, marks none."""


class RecentWaits:
    """Differences of totals over RECENT_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, float]] = deque()

    def add(self, now: float, forward_s: float, waited_s: float) -> tuple[int, int]:
        """Take the totals of now; returns the milliseconds of forwards, and of waits in them, in the last RECENT_S;
        zeros until so much was seen."""
        samples = self._samples
        if samples and forward_s < samples[-1][1]:  # another group
            samples.clear()
        samples.append((now, forward_s, waited_s))
        while len(samples) > 1 and samples[1][0] <= now - RECENT_S:
            samples.popleft()
        sampled_at, forward_then, waited_then = samples[0]
        if now - sampled_at < RECENT_S:
            return 0, 0
        scale = 1000 * RECENT_S / (now - sampled_at)
        forward_ms = int(scale * (forward_s - forward_then))
        return forward_ms, min(forward_ms, max(0, int(scale * (waited_s - waited_then))))


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
        share: Share | None = None,
    ) -> None:
        """`at_end` is told, once, why the epoch is over: it gets the main thread out of waits."""
        self._client = client
        self._lease = lease
        self._progress = progress
        self._model = model
        self._replica = replica
        self._epoch = epoch
        self._rank = rank
        self._world_size = world_size
        self._device = device
        self._at_end = at_end
        self._share = share
        self._over: EpochOver | None = None
        self._over_since = 0.0
        self._closed = False
        self._stop = threading.Event()
        self._next_beat = 0.0
        self._progress_of_others: dict[int, tuple[int, int]] = {}
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
                self._progress_of_others = {}
            elif self._others_moved():
                self._progress.moved()
        stuck = self._stuck
        if stuck and self._over is None:
            self._poison_for_hang()
        gauges = self._progress.gauges
        used_tokens, cached = self._progress.kv
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
            kv_used=used_tokens,
            kv_kept=cached,
            kv_limit=self._progress.kv_limit,
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
        renews = self._lease is not None and self._over is None and not stuck
        if renews and self._lease is not None:
            calls.append(renew(self._lease, self._world_size))
        if self._share is not None:
            calls.append(self._share.reading)
        outcomes = run_all(self._client, calls)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        if renews and outcomes[1]:
            log.warning("the lock ran out and was taken again", action="renew")
        if self._share is not None:
            self._share.take(outcomes[-1])

    def _others_moved(self) -> bool:
        """True if another rank has made progress since the last look, for which this one may wait."""
        if self._world_size == 1:
            return False
        beats = health.heartbeats(self._client, self._model, self._replica, self._world_size)
        before, self._progress_of_others = (
            self._progress_of_others,
            {
                rank: (beat.seq, beat.progress)
                for rank, beat in enumerate(beats)
                if rank != self._rank and beat is not None and beat.epoch == self._epoch
            },
        )
        return any(rank in before and before[rank] != how_far for rank, how_far in self._progress_of_others.items())

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
        observation = f"rank {culprit} has no heartbeat" if silent else "every rank still beats"
        message = (
            f"the command after {self._progress.seq} has taken {self._progress.pending_ms} ms, and no rank has got on "
            f"with it for {self._progress.stalled_s:.1f} s; {observation}"
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
        now = time.monotonic()
        since = self._over_since
        if now - max(since, self._progress.moved_at) > OVER_STILL_S or now - since > OVER_S:
            log.critical("stuck in an epoch that is over", reason=str(self._over), action="rank_exit")
            os._exit(STUCK)
