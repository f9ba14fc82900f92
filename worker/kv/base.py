"""The interface of a cache store. No sequence is ever rewound: a recurrent state could not follow. Another sequence
may begin with the start of its cache, where the store can cut one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from worker.kernels.variant import Variant


@dataclass(frozen=True)
class CacheLayout:
    """The shape of one rank's cache. `kv_heads` counts this rank's own. `windows` has one entry per layer."""

    layers: int
    kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one position in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class Extent:
    """The tokens that one sequence adds in a step: `count` of them from position `offset` on."""

    sid: int
    offset: int
    count: int

    @property
    def end(self) -> int:
        return self.offset + self.count


class CacheStep(Protocol):
    """One step's view of a store: places for the new tokens are already reserved."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        """Store key and value (kv heads, T, dim), attend query (heads, T, dim) → (T, heads, dim)."""
        ...


class KVStore(Protocol):
    """Keys and values by sequence. A sequence exists from its first committed token until it is dropped."""

    capacity_tokens: int
    block_tokens: int
    """Memory is handed out in blocks of so many positions, 1 where a sequence takes just what it has."""
    supports_prefix_sharing: bool
    """True if `fork` is possible: each position of attention's cache stands alone, of a recurrent state only the end
    is there."""

    @property
    def used_tokens(self) -> int:
        """Of `capacity_tokens`, whole blocks."""
        ...

    def rounded(self, tokens: int) -> int:
        """The part of `capacity_tokens` that `tokens` of one sequence take."""
        ...

    def length(self, sid: int) -> int | None:
        """Positions that are cached, or None for a sequence that is unknown."""
        ...

    def begin(self, extents: list[Extent], beside: Iterable[Extent] = ()) -> CacheStep:
        """Reserve room for a step whose tokens lie in the batch in the order of `extents`. Changes no length.
        `beside` are those of a step that is under way and will be committed with this one."""
        ...

    def commit(self, extents: list[Extent]) -> None:
        """The step is done: its tokens count from now on."""
        ...

    def fork(self, sid: int, donor: int, count: int, *, take_over: bool) -> None:
        """Let the unknown sequence `sid` begin with a copy of the first `count` cached positions of `donor`.
        `take_over` gives it the donor's own memory instead, and removes the donor."""
        ...

    def drop(self, sid: int) -> None:
        """Forget a sequence; an unknown one is no error."""
        ...

    def clear(self) -> None:
        """Forget every sequence."""
        ...
