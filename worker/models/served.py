"""A model that is loaded on this rank: its forward over a batch, and the group that it talks through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from control.errors import RankError
from worker.collective import Collective
from worker.collective.base import Link
from worker.kv.base import CacheLayout, WholeLayout
from worker.models.batch import Batch
from worker.models.native.forward import Array, NativeForward
from worker.models.native.modules import CausalModel
from worker.native.library import Threads

if TYPE_CHECKING:  # they import torch
    from worker.models.torch.pooled.pooler import Pooler
    from worker.models.torch.vision.tower import VisionTower

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
        """What the bits of the C++ products depend on; None for a model without any."""
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


class NativeModel(ServedModel):
    """A model whose forward is C++."""

    def __init__(
        self,
        model: CausalModel,
        forward: NativeForward,
        link: Link,
        cache_layout: CacheLayout,
        vocab_size: int,
        pooler: Pooler | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        super().__init__(model.config, link, cache_layout, vocab_size, pooler, tower)
        self.module = model
        self._native = forward
        # A tied head and embedding are one table and counted once.
        self.weight_bytes = model.bytes + (0 if tower is None else tower.bytes)

    @property
    def is_native(self) -> bool:
        return True

    @property
    def kernels(self) -> str | None:
        return self._native.kernels

    @property
    def threads(self) -> Threads | None:
        return self._native.threads

    @property
    def no_logits(self) -> Array:
        return np.empty((0, self.vocab_size), np.float32)

    def accept(self, accepted: Mapping[int, int]) -> None:
        self._native.accept(accepted)

    def parts(self) -> Iterator[Any]:
        return (part for _, part in self.module.modules())

    @property
    def progress(self) -> int:
        return super().progress + self._native.progress

    def _forward(self, batch: Batch, hear: Hear | None = None) -> Array:
        logits = self._native(batch)
        tell(hear, batch.scored, self._native.logits_at)
        return logits


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
