"""Divides the sequences of a step among threads: each computes its part alone, so none waits for another in a layer.

torch divides each product among its threads instead, and every product waits for the slowest of them. A thread that has
lost its processor for a moment then delays all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from torch import Tensor

LEAST_TOKENS = 64
"""Fewer tokens of a part make products slow."""


class RowThreads:
    """Threads that each compute products by themselves. They end with this object."""

    def __init__(self, count: int) -> None:
        """`count` is 1 on a device that is no CPU: the caller's thread computes all."""
        self._count = count
        before = torch.get_num_threads()
        self._pool = None if self._count < 2 else ThreadPoolExecutor(self._count, "rows", _alone)
        if self._pool is not None:
            started = Barrier(self._count)
            list(self._pool.map(started.wait, [None] * self._count))
            torch.set_num_threads(before)  # the number for threads to come, which each of the pool's has set to 1

    def run(self, counts: Sequence[int], compute: Callable[[slice], Tensor]) -> list[Tensor]:
        """`compute` for neighbouring sequences together; `counts` are the tokens of each. The results are in order. One
        part alone is computed by the caller's thread."""
        parts = divided(counts, self._count)
        if self._pool is None or len(parts) == 1:
            return [compute(part) for part in parts]
        return list(self._pool.map(torch.inference_mode()(compute), parts))


def divided(counts: Sequence[int], most: int) -> list[slice]:
    """Neighbouring places of `counts` in at most `most` parts of about equal sums, each of LEAST_TOKENS or more."""
    total = sum(counts)
    threads = max(1, min(most, len(counts), total // LEAST_TOKENS))
    borders = [0]
    done = 0
    for place, count in enumerate(counts):
        # The border goes to the side on which it is nearer to an equal share.
        if place > borders[-1] and len(borders) < threads and done + count / 2 > total * len(borders) / threads:
            borders.append(place)
        done += count
    return [slice(start, stop) for start, stop in zip(borders, [*borders[1:], len(counts)], strict=True)]


def _alone() -> None:
    torch.get_num_threads()  # the first call in a thread takes the process's number: it must precede the thread's own
    torch.set_num_threads(1)
