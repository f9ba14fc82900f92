"""A model that is loaded on this rank: the batches that it takes, its forward over one, and its group."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from control.errors import RankError
from worker.collective import Collective
from worker.collective.base import Link
from worker.kv.base import CacheLayout, CacheStep, Extent, WholeLayout
from worker.native.library import Threads

if TYPE_CHECKING:
    from worker.models.torch.pooled import Pooler
    from worker.models.torch.vision import VisionTower


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
    """The number of its last tokens that are guesses, which the logits before them confirm or not."""
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
        """The number of its positions that are sampled."""
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


SCORED_AT_ONCE = 64
"""Positions whose logits are held together, of all that a step scores: a large vocabulary makes each of them large."""

Hear = Callable[[Any, int], None]
"""(logits (count, vocabulary), index of the first among the batch's scored positions). It must not raise: the other
ranks go on to the next ones."""


class ServedModel:
    """One rank's shard. Public: `vocab_size`, `cache_layout`, `dtype`, `device`, `weight_bytes`, `tower`."""

    weight_bytes: int

    def __init__(
        self,
        config: Any,
        link: Link,
        cache_layout: CacheLayout | WholeLayout,
        vocab_size: int,
        pooler: Pooler | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        """`config`: transformers', or one with its names. `pooler` makes a vector of what the forward gives for a
        sequence, its hidden states; `tower` is that of a model that takes images."""
        self._config = config
        self._link = link
        self._pooler = pooler
        self.tower = tower
        self.cache_layout = cache_layout
        self.vocab_size = vocab_size
        self.dtype = cache_layout.dtype
        self.device = cache_layout.device

    @property
    def is_native(self) -> bool:
        """True if the forward is C++."""
        return False

    @property
    def kernels(self) -> str | None:
        """The kernels on which the bits of the C++ products depend; None for a model without any."""
        raise NotImplementedError

    @property
    def uses_torch(self) -> bool:
        """True if torch computes the forward or a part beside it: an image tower, a pooler."""
        return not self.is_native or self._pooler is not None or self.tower is not None

    @property
    def batch_invariant(self) -> bool:
        """True if a token's logits have the same bits in any batch and chunk, and with any number of threads."""
        return self.is_native and self._link.collective.batch_invariant

    @property
    def threads(self) -> Threads | None:
        """Those of the forward in C++; None where torch runs it: the logits may be on a device."""
        return None

    @property
    def no_logits(self) -> Any:
        """Logits (0, vocabulary), of a step without a row."""
        raise NotImplementedError

    def accept(self, accepted: Mapping[int, int]) -> None:
        """Of the last forward's guesses the first ones were right, so many by sequence: recurrent states advance over
        them."""

    def parts(self) -> Iterator[Any]:
        """All modules, of torch or native/module.py."""
        raise NotImplementedError

    @property
    def progress(self) -> int:
        """A number that changes with each layer of a forward; for any thread. A layer that is launched on a device
        counts as done."""
        return 0 if self.tower is None else self.tower.progress

    @property
    def collective(self) -> Collective:
        return self._link.collective

    @property
    def waits_for_device(self) -> bool:
        """True if the forward reads values from the device, as the loop over experts asks which of them were hit; or if
        its result is read at once, as vectors are."""
        return self._pooler is not None or are_in_model(self._config)

    def join(self, collective: Collective) -> None:
        """Talk through another group from now on, with the weights as they are. Rank and size must be the same."""
        old = self._link.collective
        if (collective.rank, collective.world_size) != (old.rank, old.world_size):
            raise RankError(
                collective.rank,
                "bad_request",
                f"the shard was loaded as rank {old.rank} of {old.world_size}, but the group says rank "
                f"{collective.rank} of {collective.world_size}; load the model again",
            )
        self._link.collective = collective

    def forward(self, batch: Batch, hear: Hear | None = None) -> Any:
        """Logits (sampled rows, vocabulary), whole on every rank: a float32 array where the forward is C++, else a
        tensor, of float64 for a float64 model. Stores the batch's keys and values, which the caller commits. `hear`
        gets the logits of the scored positions a few at a time. A model with a pooler returns vectors (sampled rows,
        dimensions) in a tensor."""
        waits = self.collective.waits
        waits.begin()
        try:
            if self._pooler is not None:
                return self._pooler(batch, self._forward)
            return self._forward(batch, hear)
        finally:
            waits.end()

    def _forward(self, batch: Batch, hear: Hear | None = None) -> Any:
        raise NotImplementedError


def are_in_model(config: Any) -> bool:
    """True if a model of transformers' configuration has experts."""
    return hasattr(config, "num_experts_per_tok") or bool(getattr(config, "enable_moe_block", False))


def tell(hear: Hear | None, scored: Any, logits_at: Callable[[Any], Any]) -> None:
    """Give `hear` the logits of the scored positions, piece by piece; on ranks that don't hear them they are computed
    all the same, as others wait for their part."""
    if scored is None:
        return
    for start in range(0, len(scored), SCORED_AT_ONCE):
        piece = logits_at(scored[start : start + SCORED_AT_ONCE])
        if hear is not None:
            hear(piece, start)
