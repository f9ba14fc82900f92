"""A pool: slabs of one capacity, side by side in one tensor, so that many sequences decode in one matrix product.

Slots 0..len-1 are always the occupied ones, so the pool's front is a batch without a gather. Whatever lies behind a
sequence's last position is zero: padding is read (with weight 0), and a stale NaN would make 0 · NaN = NaN there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.kv.base import CacheLayout

FIRST_SLOTS = 4


class Pool:
    """Slabs of `capacity` positions. The memory is one tensor (layers, 2, slots, kv heads, capacity, head dim)."""

    def __init__(self, layout: CacheLayout, capacity: int) -> None:
        self.layout, self.capacity = layout, capacity
        self.owners: list[int] = []
        """Slot → sequence."""
        self._memory = self._allocate(0)
        self._views()

    def __len__(self) -> int:
        return len(self.owners)

    @property
    def slots(self) -> int:
        return self._memory.shape[2]

    def take(self, sid: int) -> int:
        """A zeroed slot for `sid`; doubles the pool when it is full, so growth stays linear in what is stored."""
        slot = len(self.owners)
        if slot == self.slots:
            larger = self._allocate(max(FIRST_SLOTS, 2 * slot))
            larger[:, :, :slot] = self._memory
            self._memory = larger
            self._views()
        self.owners.append(sid)
        return slot

    def release(self, slot: int, used: int, last_used: int) -> int | None:
        """Free `slot` (its first `used` positions were written). The last slot, with `last_used` written, moves into
        the hole; returns the sequence that moved, if any. An empty pool gives its memory back."""
        last = len(self.owners) - 1
        sid = self.owners.pop()
        moved: int | None = None
        if slot != last:
            # Behind last_used the last slot is zero, so copying the longer of the two clears the hole's rest as well.
            span = max(used, last_used)
            self._memory[:, :, slot, :, :span] = self._memory[:, :, last, :, :span]
            self.owners[slot] = moved = sid
        if not self.owners:
            self._memory = self._allocate(0)
            self._views()
        else:
            self._memory[:, :, last, :, :last_used] = 0
        return moved

    def copy_to(self, slot: int, other: Pool, other_slot: int, length: int) -> None:
        """Move a sequence's first `length` positions into a slab of another pool."""
        other._memory[:, :, other_slot, :, :length] = self._memory[:, :, slot, :, :length]

    def _allocate(self, slots: int) -> Tensor:
        layout = self.layout
        shape = (layout.layers, 2, slots, layout.kv_heads, self.capacity, layout.head_dim)
        # On a CPU fresh zeros cost nothing until they are written: the kernel maps pages at first touch.
        return torch.zeros(shape, dtype=layout.dtype, device=layout.device)

    def _views(self) -> None:
        self.keys = [layer[0] for layer in self._memory]
        self.values = [layer[1] for layer in self._memory]
