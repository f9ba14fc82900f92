"""The slow ranks of a group, from the heartbeats of one moment."""

from __future__ import annotations

from collections.abc import Sequence

from control.replicas.health.beats import Beat

LEAST_MS = 500
"""Forwards of the last five seconds, below which too little was seen."""
WAITS = 0.5
"""Share of a rank's forwards from which on it waits for others."""
NEVER_WAITS = 0.1
"""Share below which others wait for it."""


def slow_ranks(beats: Sequence[Beat | None]) -> list[int]:
    """The ranks for which all others of their group wait: those spend more than half of their forwards so, these less
    than a tenth. Empty while a rank is silent, or the group has hardly computed."""
    heard = [beat for beat in beats if beat is not None]
    if len(beats) < 2 or len(heard) < len(beats) or len({beat.epoch for beat in heard}) > 1:
        return []
    if any(beat.forward_ms < LEAST_MS for beat in heard):
        return []
    shares = [beat.waited_ms / beat.forward_ms for beat in heard]
    slow = [rank for rank, share in enumerate(shares) if share < NEVER_WAITS]
    waiting = [rank for rank, share in enumerate(shares) if share > WAITS]
    return slow if waiting and len(slow) + len(waiting) == len(shares) else []
