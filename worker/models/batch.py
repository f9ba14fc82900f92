"""A step's batch: the rows of all sequences, flattened one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.kv.base import CacheStep, Extent

Numbers = Any
"""An array, or a tensor on the device of a model that torch computes."""

AXES = 3
"""Of a token's place among images: time, height and width."""


@dataclass(frozen=True)
class Row:
    """Tokens that one sequence feeds in a step; `offset` counts the positions that its cache holds before them."""

    sid: int
    tokens: list[int]
    offset: int
    sample: bool
    scored: range = range(0)
    """Its positions whose logits are wanted too, to score the tokens that came after them."""
    guesses: int = 0
    """How many of its last tokens are guesses, which the logits before them confirm or not."""
    second: int = 0
    """The position at which the second text of a pair begins, 0 for a single text."""
    snapshot: bool = False
    """True if the recurrent state behind it is kept, for others to begin with."""

    @property
    def extent(self) -> Extent:
        return Extent(self.sid, self.offset, len(self.tokens))

    def extent_up_to(self, accepted: int) -> Extent:
        """Its tokens up to the last of `accepted` guesses."""
        return Extent(self.sid, self.offset, len(self.tokens) - self.guesses + accepted)

    @property
    def samples(self) -> int:
        """How many of its positions are sampled."""
        return 1 + self.guesses if self.sample else 0


@dataclass(frozen=True)
class ImageRows:
    """Rows that stand for images in a batch."""

    places: Numbers
    """(R,) int64: indices into T of the placeholders."""
    rows: Numbers
    """(R, hidden): the embeddings there."""
    layers: Numbers
    """(layers, R, hidden), contiguous: added to the outputs of the first layers."""


@dataclass(frozen=True)
class Batch:
    """The input of a model's forward. T counts all tokens, S the positions that are sampled."""

    tokens: Numbers
    """Token ids: (T,) int64."""
    positions: Numbers
    """(T,) int64: each token's place in its own sequence."""
    sampled: Numbers
    """(S,) int64: indices into T of the last token of each sampled row, and of those before its guesses."""
    cache: CacheStep
    scored: Numbers | None = None
    """int64: indices into T of the positions that are scored; None where there are none."""
    rows: Sequence[Row] = ()
    """The rows that were flattened."""
    types: Numbers | None = None
    """(T,) int64: 1 for the tokens of the second text of a pair, else 0; None where there are none."""
    axes: Numbers | None = None
    """(3, T) int64: each token's positions in time, height and width, where a sequence has images; else None."""
    images: ImageRows | None = None
    ends: Numbers | None = None
    """(T,) int64: the position before which each token sees its sequence, where one sees others than those before it
    and itself; else None."""


def flatten(
    rows: list[Row],
    cache: CacheStep,
    axes: NDArray[np.int64] | None = None,
    images: ImageRows | None = None,
    ends: NDArray[np.int64] | None = None,
) -> Batch:
    """The batch of `rows`, in arrays."""
    tokens: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    scored: list[int] = []
    for row in rows:
        scored.extend(len(tokens) + position - row.offset for position in row.scored)
        tokens.extend(row.tokens)
        positions.extend(range(row.offset, row.offset + len(row.tokens)))
        sampled.extend(range(len(tokens) - row.samples, len(tokens)))

    types = [
        int(0 < row.second <= position)
        for row in (rows if any(row.second for row in rows) else [])
        for position in range(row.offset, row.offset + len(row.tokens))
    ]
    return Batch(
        tokens=np.array(tokens, np.int64),
        positions=np.array(positions, np.int64),
        sampled=np.array(sampled, np.int64),
        cache=cache,
        scored=np.array(scored, np.int64) if scored else None,
        rows=rows,
        types=np.array(types, np.int64) if types else None,
        axes=axes,
        images=images,
        ends=ends,
    )
