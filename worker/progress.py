"""What a rank's main thread is doing, for the side thread that reports and judges it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["starting", "forming", "loading", "ready"]

STEP_FLOOR_S = 2.0
"""No step is called hung before this."""
STEP_FACTOR = 10.0
"""A step that takes this many times the p99 of its kind is hung."""
UNKNOWN_STEP_S = 20.0
"""Deadline while there is no history: the first steps warm caches, allocators and kernels."""
PER_TOKEN_S = 0.05
"""Extra time for each prompt token in a step; a 512-token chunk may take 25 s on the slowest machine served."""


@dataclass
class Deadlines:
    """Step deadlines learnt from the steps of this process: max(2 s, 10 × p99) plus time for prompt tokens."""

    _decode_s: deque[float] = field(default_factory=lambda: deque(maxlen=512))

    def observe(self, seconds: float, prompt_tokens: int) -> None:
        """Record a finished step; only steps without prompt tokens teach, the others vary with their size."""
        if not prompt_tokens:
            self._decode_s.append(seconds)

    def step(self, prompt_tokens: int) -> float:
        """Seconds that a step which feeds `prompt_tokens` may take."""
        if len(self._decode_s) < 20:
            return UNKNOWN_STEP_S + PER_TOKEN_S * prompt_tokens
        p99 = sorted(self._decode_s)[int(len(self._decode_s) * 0.99)]
        return max(STEP_FLOOR_S, STEP_FACTOR * p99) + PER_TOKEN_S * prompt_tokens


class Progress:
    """Written by the main thread, read by the pulse; each field is assigned atomically, so no lock is needed."""

    def __init__(self) -> None:
        self.phase: Phase = "starting"
        self.seq = 0
        self.kv: Callable[[], tuple[int, int]] = lambda: (0, 0)
        """Tokens of KV memory that are in use and that are kept; only a leader knows."""
        self.read_share: Callable[[], float] = lambda: 0.0
        """How much of the checkpoint has been read, 0 to 1."""
        self._pending: tuple[float, float] | None = None
        self._excused: tuple[float, float] | None = None

    def begin(self, deadline_s: float) -> None:
        """The main thread starts something that must end within `deadline_s` seconds."""
        self._pending = (time.monotonic(), deadline_s)

    def excuse(self, seconds: float) -> None:
        """Redis was away for so long, until now, and what was under way can't be blamed for it. For the pulse alone."""
        pending = self._pending
        if pending is not None:
            before = self._excused[1] if self._excused and self._excused[0] == pending[0] else 0.0
            self._excused = (pending[0], before + min(seconds, time.monotonic() - pending[0]))

    def end(self, seq: int) -> float:
        """It ended, as command `seq`; returns the seconds that it took."""
        started = self._pending[0] if self._pending else time.monotonic()
        self._pending = None
        self.seq = seq
        return time.monotonic() - started

    def idle(self) -> None:
        """Nothing is under way."""
        self._pending = None

    @property
    def pending_ms(self) -> int:
        """Age of what is under way, 0 if nothing is."""
        pending = self._pending
        return int((time.monotonic() - pending[0]) * 1000) if pending else 0

    @property
    def overdue(self) -> bool:
        pending, excused = self._pending, self._excused
        if pending is None:
            return False
        away = excused[1] if excused is not None and excused[0] == pending[0] else 0.0
        return time.monotonic() - pending[0] - away > pending[1]
