"""The leader's part of vectors and scores: from a forward's rows to the bytes of each sequence's result."""

from __future__ import annotations

from typing import Any

import numpy as np
import structlog

from worker.engine.step import NO_TOKEN, Forward
from worker.sampling.sampler import StepTokens
from worker.scheduling.sequence import Sequence

log = structlog.get_logger()

SHORTEST = 1e-12
"""A vector that is shorter is divided by this length instead of its own."""
NOT_FINITE = "the model's numbers for this input are not finite"


def result_of(vector: Any, dimensions: int | None) -> bytes | None:
    """A vector of numpy as float32 bytes, cut to so many numbers and at length 1 again where that was asked for; None
    for one that is not finite."""
    if not np.isfinite(vector).all():
        return None
    if dimensions is not None:
        vector = vector[:dimensions]
        vector = vector / max(np.linalg.norm(vector), SHORTEST)
    return vector.astype("<f4").tobytes()


class VectorSampler:
    """Takes the place of a `StepSampler`: a row's token is 0, which no client gets, and its result is in `vectors`."""

    def begin(self, rows: list[Sequence], forward: Forward) -> PendingVectors:
        """Raises ValueError where `rows` are not those of the forward."""
        sids = [row.sid for row in rows]
        if forward.sids != sids:
            raise ValueError(f"the engine has vectors of {forward.sids}, the plan of {sids}")
        return PendingVectors(rows, forward.logits)


class PendingVectors:
    """The vectors (rows, dimensions) of one forward."""

    on_device = None

    def __init__(self, rows: list[Sequence], vectors: Any) -> None:
        self._rows = rows
        self._vectors = vectors

    def wait(self) -> StepTokens:
        """The vectors as `result_of`. A vector that is not finite ends its sequence alone."""
        outcome = StepTokens([0] * len(self._rows))
        vectors = self._vectors.cpu().numpy()
        for index, (row, vector) in enumerate(zip(self._rows, vectors, strict=True)):
            result = result_of(vector, row.sampling.dimensions)
            if result is None:
                log.error("a row failed", rid=row.rid, choice=row.choice, error="not finite", action="pool")
                outcome.ids[index] = NO_TOKEN
                outcome.failures[index] = NOT_FINITE
            else:
                outcome.vectors[index] = result
        return outcome
