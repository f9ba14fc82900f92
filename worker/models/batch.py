"""A step's batch: the rows of all sequences, flattened one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.kv.base import CacheStep, Extent


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

    def known(self, accepted: int) -> Extent:
        """Its tokens up to the last of `accepted` guesses."""
        return Extent(self.sid, self.offset, len(self.tokens) - self.guesses + accepted)

    @property
    def samples(self) -> int:
        """How many of its positions are sampled."""
        return 1 + self.guesses if self.sample else 0


@dataclass(frozen=True)
class ImageRows:
    """Rows that stand for images in a batch."""

    places: Tensor
    """(R,) int64: indices into T of the placeholders."""
    rows: Tensor
    """(R, hidden): the embeddings there."""
    layers: Tensor
    """(layers, R, hidden), contiguous: added to the outputs of the first layers."""


@dataclass(frozen=True)
class Batch:
    """The input of a model's forward. T counts all tokens, S the positions that are sampled."""

    tokens: Tensor
    """Token ids: (T,) int64."""
    positions: Tensor
    """(T,) int64: each token's place in its own sequence."""
    sampled: Tensor
    """(S,) int64: indices into T of the last token of each sampled row, and of those before its guesses."""
    cache: CacheStep
    scored: Tensor | None = None
    """int64: indices into T of the positions that are scored; None where there are none."""
    rows: Sequence[Row] = ()
    """The rows that were flattened."""
    types: Tensor | None = None
    """(T,) int64: 1 for the tokens of the second text of a pair, else 0; None where there are none."""
    axes: Tensor | None = None
    """(3, T) int64: each token's positions in time, height and width, where a sequence has images; else None."""
    images: ImageRows | None = None
    ends: Tensor | None = None
    """(T,) int64: the position before which each token sees its sequence, where one sees others than those before it
    and itself; else None."""


def flatten(
    rows: list[Row],
    cache: CacheStep,
    device: torch.device,
    axes: Tensor | None = None,
    images: ImageRows | None = None,
    ends: Tensor | None = None,
) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    scored: list[int] = []
    for row in rows:
        scored.extend(len(tokens) + position - row.offset for position in row.scored)
        tokens.extend(row.tokens)
        positions.extend(range(row.offset, row.offset + len(row.tokens)))
        sampled.extend(range(len(tokens) - row.samples, len(tokens)))

    def sent(numbers: list[int]) -> Tensor:
        # A tensor that is made on a device waits for what runs there.
        return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)

    types = [
        int(0 < row.second <= position)
        for row in (rows if any(row.second for row in rows) else [])
        for position in range(row.offset, row.offset + len(row.tokens))
    ]
    return Batch(
        tokens=sent(tokens),
        positions=sent(positions),
        sampled=sent(sampled),
        cache=cache,
        scored=sent(scored) if scored else None,
        rows=rows,
        types=sent(types) if types else None,
        axes=axes,
        images=images,
        ends=ends,
    )
