"""The last seconds of a rank's forwards and waits, as its heartbeat tells them."""

from __future__ import annotations

from collections import deque

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
        then, forward_then, waited_then = samples[0]
        if now - then < RECENT_S:
            return 0, 0
        scale = 1000 * RECENT_S / (now - then)
        forward_ms = int(scale * (forward_s - forward_then))
        return forward_ms, min(forward_ms, max(0, int(scale * (waited_s - waited_then))))
