"""The progress of a rank's main thread, read by the side thread that reports it and detects a stall."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from worker.detectors import PER_TOKEN_S, STEP_FACTOR, STEP_FLOOR_S, UNKNOWN_STEP_S
from worker.rank import series
from worker.rank.counters import Counters

Phase = Literal["starting", "forming", "loading", "ready"]

LEARN_EVERY = 20
"""Steps between two computations of the p99, and before the first one."""


@dataclass(frozen=True, slots=True)
class Served:
    """Requests that run; tokens, first tokens, and the sum of the times to these, since the counters began."""

    running: int = 0
    tokens: int = 0
    first_tokens: int = 0
    first_tokens_ms: int = 0


@dataclass
class Deadlines:
    """How long a step may show no progress: max(2 s, 10 × p99 of the epoch's steps) plus time for prompt tokens."""

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
    """What a rank's worker shows of itself, for any thread."""

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
        self._pending: _Command | None = None
        self._seen = 0
        self.moved_at = 0.0
        """Time of the main thread's last progress."""
        self._since: tuple[_Command, float] | None = None
        """The command under way, and since when it stands still, where that is not since its beginning."""

    def begin(self, deadline_s: float, moved: Callable[[], None] = lambda: None) -> None:
        """Start a command, which must show progress every `deadline_s` seconds until it ends. The side thread calls
        `moved` at each progress."""
        self._pending = _Command(time.monotonic(), deadline_s, moved)

    def look(self) -> None:
        """Note whether the main thread has got on since the last look. For the heartbeat alone."""
        count = self.gauges.progress
        if count != self._seen:
            self._seen = count
            self.moved_at = time.monotonic()
            self.moved()

    def moved(self) -> None:
        """The command under way has got on, on this rank or on another one. For the heartbeat alone."""
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
    def served(self) -> Served:
        """The counts of requests; only a leader has any."""
        *firsts, seconds = self._counters.read(series.TO_FIRST_TOKEN)
        return Served(
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
        """For how long what is under way has not got on, 0 if nothing is."""
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
