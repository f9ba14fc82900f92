"""A pool: slabs of one capacity, side by side in one tensor, so that many sequences decode in one matrix product.

A sequence stays in its slot. Memory behind its last position is zero: it is read with weight 0, and 0 · NaN is NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from worker.kv.base import CacheLayout
from worker.native.zeros import zeros

FIRST_SLOTS = 4
DOUBLED_BYTES = 16 * 2**20
"""A pool that would be larger gets a sibling instead of growing: copying half of this stalls a step for some 5 ms."""


class Pool:
    """Slabs of `capacity` positions. `memories` has a tensor (layers, 2, slots, kv heads, capacity, head dim) for each
    of the layout's groups; `keys` and `values` are views of them by layer of the model."""

    def __init__(self, layout: CacheLayout, capacity: int, slots: int = FIRST_SLOTS) -> None:
        self.layout, self.capacity = layout, capacity
        self.memories = self._allocate(slots)
        self._free = list(reversed(range(slots)))
        """Free slots, the lowest last: sequences that decode together lie together."""
        self._views()

    @property
    def slots(self) -> int:
        return self.memories[0].shape[2]

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def empty(self) -> bool:
        return len(self._free) == self.slots

    @property
    def may_double(self) -> bool:
        return 2 * sum(memory.nbytes for memory in self.memories) <= DOUBLED_BYTES

    def double(self) -> None:
        """Twice the slots; those there are stay what and where they are."""
        slots = self.slots
        larger = self._allocate(2 * slots)
        for new, old in zip(larger, self.memories, strict=True):
            new[:, :, :slots] = old
        self.memories = larger
        self._free = [*reversed(range(slots, 2 * slots)), *self._free]
        self._views()

    def take(self) -> int:
        """The lowest free slot, zeroed. Raises IndexError where the pool is full."""
        return self._free.pop()

    def release(self, slot: int, used: int) -> None:
        """Free `slot`, of which the first `used` positions were written. Throw a pool away that is empty after this."""
        self._free = sorted([*self._free, slot], reverse=True)
        if not self.empty:
            self.clear(slot, 0, used)

    def clear(self, slot: int, start: int, stop: int) -> None:
        """Zero positions [start, stop) of a slot."""
        for memory in self.memories:
            memory[:, :, slot, :, start:stop] = 0

    def copy_to(self, slot: int, other: Pool, other_slot: int, length: int) -> None:
        """Copy the first `length` positions of a slot into a slab of this or another pool."""
        for to, memory in zip(other.memories, self.memories, strict=True):
            to[:, :, other_slot, :, :length] = memory[:, :, slot, :, :length]

    def _allocate(self, slots: int) -> list[Tensor]:
        return [
            self._zeros((len(one.layers), 2, slots, one.kv_heads, self.capacity, one.head_dim))
            for one in self.layout.groups
        ]

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        layout = self.layout
        if torch.device(layout.device).type == "cpu":
            # Small pages: a short sequence in a long slab shall take no more memory than was promised for its tokens.
            return zeros(math.prod(shape), layout.dtype, large=False).view(shape)
        return torch.zeros(shape, dtype=layout.dtype, device=layout.device)

    def _views(self) -> None:
        layers = [self.memories[group][place] for group, place in self.layout.places]
        self.keys, self.values = [layer[0] for layer in layers], [layer[1] for layer in layers]
