"""Which tokens the constrained rows of a step may have next, for all of them in one call of the library."""

from __future__ import annotations

import os

import numpy as np
import torch
from llguidance import LLExecutor

from worker.scheduling.sequence import Sequence

_THREADS = 8
"""More find no work: a row takes some 20 µs."""


class Masks:
    """Fills bit masks; the memory for them is kept."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or min(_THREADS, len(os.sched_getaffinity(0)))
        self._executor: LLExecutor | None = None

    def fill(self, rows: list[Sequence]) -> dict[int, torch.Tensor]:
        """By sid, the bits [ceil(vocabulary / 8)] uint8 of each row whose constraint has not failed, lowest bit first.

        A row without an entry that has a constraint must not be sampled: `constraint.failure` says why.
        """
        chosen = [
            (row.sid, row.constraint) for row in rows if row.constraint is not None and not row.constraint.failure
        ]
        if not chosen:
            return {}
        width = 4 * -(-chosen[0][1].vocab_size // 32)
        bits = np.zeros((len(chosen), width), dtype=np.uint8)
        if len(chosen) == 1:
            chosen[0][1].matcher.unsafe_compute_mask_ptr(bits.ctypes.data, width)
        else:
            if self._executor is None:
                self._executor = LLExecutor(self._threads)
            matchers = [(constraint.matcher, index) for index, (_, constraint) in enumerate(chosen)]
            self._executor.unsafe_compute_mask_ptr(matchers, bits.ctypes.data, width, len(chosen))
        for index, (_, constraint) in enumerate(chosen):
            if not constraint.failure:
                constraint.finish(bits[index])
        whole = torch.from_numpy(bits)
        return {sid: whole[index] for index, (sid, constraint) in enumerate(chosen) if not constraint.failure}
