"""Which tokens the constrained rows of a step may have next, for all of them in one call of the library."""

from __future__ import annotations

import os

import numpy as np
import torch
from llguidance import LLExecutor

from worker.scheduling.sequence import Sequence

_THREADS = 8
"""Most threads that compute masks; a row takes some 25 µs."""
_TOGETHER = 16
"""Rows from which on it pays to wake threads. On a host of few processors it never does: they have other work."""


class Masks:
    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or min(_THREADS, len(os.sched_getaffinity(0)) // 2)
        self._executor: LLExecutor | None = None

    def fill(self, rows: list[Sequence]) -> dict[int, torch.Tensor]:
        """By index, the bits [ceil(vocabulary / 8)] uint8 of each row that has a grammar, lowest of a byte first. A row
        whose constraint has failed, perhaps only here, is left out: it must not be sampled."""
        bound = [(place, row.constraint) for place, row in enumerate(rows) if row.constraint is not None]
        chosen = [(place, constraint) for place, constraint in bound if not constraint.failure]
        if not chosen:
            return {}
        width = 4 * -(-chosen[0][1].vocab_size // 32)
        bits = np.zeros((len(chosen), width), dtype=np.uint8)
        if self._threads < 2 or len(chosen) < _TOGETHER:
            for index, (_, constraint) in enumerate(chosen):
                constraint.matcher.unsafe_compute_mask_ptr(bits[index].ctypes.data, width)
        else:
            if self._executor is None:
                self._executor = LLExecutor(self._threads)
            matchers = [(constraint.matcher, index) for index, (_, constraint) in enumerate(chosen)]
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, width, len(chosen))
        for index, (_, constraint) in enumerate(chosen):
            if not constraint.failure:
                constraint.finish(bits[index])
        whole = torch.from_numpy(bits)
        return {place: whole[index] for index, (place, constraint) in enumerate(chosen) if not constraint.failure}
