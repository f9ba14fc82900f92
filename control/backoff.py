"""Pauses between tries that fail one after the other."""

from __future__ import annotations

from collections.abc import Sequence


def doubling(first_s: float, longest_s: float) -> tuple[float, ...]:
    """Pauses in seconds, each twice as long as the one before; the last is `longest_s`.

    >>> doubling(0.5, 3.0)
    (0.5, 1.0, 2.0, 3.0)
    """
    pauses = [first_s]
    while pauses[-1] < longest_s:
        pauses.append(min(2 * pauses[-1], longest_s))
    return tuple(pauses)


def pause_after(failures: int, pauses_s: Sequence[float]) -> float:
    """The pause in seconds after so many failures in a row, at least one; the last of `pauses_s` is repeated."""
    return pauses_s[min(failures, len(pauses_s)) - 1]
