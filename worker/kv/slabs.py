"""The store of contiguous slabs: each sequence owns one slab, in the pool of its size."""

from __future__ import annotations

from collections.abc import Iterable

from worker.kv.base import CacheLayout, Extent
from worker.kv.pool import FIRST_SLOTS, Pool
from worker.kv.slab_step import Place, SlabStep

FIRST_CAPACITY = 256
"""Positions of the smallest slab. Each further pool's are twice as long, so a long sequence moves seldom."""

OVERHEAD = 2
"""Bytes that may be touched per byte of cached tokens: while a pool doubles, its old and its new copy both exist."""


def tokens_that_fit(free_bytes: int, layout: CacheLayout) -> int:
    """How many cached tokens to promise for so much free memory."""
    return max(0, free_bytes) // (OVERHEAD * layout.bytes_per_token)


class SlabStore:
    """Cached keys and values on one device, bounded by `capacity_tokens`."""

    block_tokens = 1
    cuts = True

    def __init__(self, layout: CacheLayout, capacity_tokens: int) -> None:
        self.layout, self.capacity_tokens = layout, capacity_tokens
        self._pools: dict[int, list[Pool]] = {}
        """By capacity."""
        self._places: dict[int, Place] = {}
        self._lengths: dict[int, int] = {}

    @property
    def used_tokens(self) -> int:
        return sum(self._lengths.values())

    @property
    def reserved_bytes(self) -> int:
        """Address space of all pools; on a CPU only what was written is resident."""
        pools = [pool for siblings in self._pools.values() for pool in siblings]
        return sum(pool.slots * pool.capacity for pool in pools) * self.layout.bytes_per_token

    def rounded(self, tokens: int) -> int:
        return tokens

    def length(self, sid: int) -> int | None:
        return self._lengths.get(sid)

    def begin(self, extents: list[Extent], beside: Iterable[Extent] = ()) -> SlabStep:
        for extent in extents:
            self._reserve(extent)
        return SlabStep(self.layout, extents, [self._places[extent.sid] for extent in extents])

    def commit(self, extents: list[Extent]) -> None:
        for extent in extents:
            self._lengths[extent.sid] = extent.end

    def fork(self, sid: int, donor: int, count: int, *, take_over: bool) -> None:
        place = self._places[donor]
        if take_over:
            self._places[sid] = self._places.pop(donor)
            del self._lengths[donor]
            place.pool.clear(place.slot, count, place.written)
            place.written = min(count, place.written)
        else:
            self._places[sid] = self._copy(place, count, count + 1)
        self._lengths[sid] = count

    def drop(self, sid: int) -> None:
        self._lengths.pop(sid, None)
        if (place := self._places.pop(sid, None)) is not None:
            self._vacate(place)

    def clear(self) -> None:
        self._pools.clear()
        self._places.clear()
        self._lengths.clear()

    def _reserve(self, extent: Extent) -> None:
        place = self._places.get(extent.sid)
        if place is None:
            place = self._places[extent.sid] = self._take(extent.end)
        elif extent.end > place.pool.capacity:
            self._places[extent.sid] = self._copy(place, extent.offset, extent.end)
            self._vacate(place)
            place = self._places[extent.sid]
        # Marked before the forward: should it fail half way, what it wrote is still cleared when the slab is given up.
        place.written = max(place.written, extent.end)

    def _copy(self, place: Place, count: int, length: int) -> Place:
        """A new slab for `length` positions, the first `count` as in `place`."""
        copy = self._take(length)
        place.pool.copy_to(place.slot, copy.pool, copy.slot, count)
        copy.written = count
        return copy

    def _take(self, length: int) -> Place:
        """A slab of zeros for `length` positions."""
        capacity = FIRST_CAPACITY
        while capacity < length:
            capacity *= 2
        siblings = self._pools.setdefault(capacity, [])
        pool = next((pool for pool in siblings if not pool.full), None)
        if pool is None and siblings and siblings[-1].may_double:
            pool = siblings[-1]
            pool.double()
        elif pool is None:
            pool = Pool(self.layout, capacity, self._slots(capacity, siblings))
            siblings.append(pool)
        return Place(pool, pool.take(), 0)

    def _slots(self, capacity: int, siblings: list[Pool]) -> int:
        """Of one more pool: as many as there are, so that pools stay few, but hardly more than could ever be filled."""
        slots = max(FIRST_SLOTS, sum(sibling.slots for sibling in siblings))
        if capacity == FIRST_CAPACITY:
            return slots
        return min(slots, max(1, 2 * self.capacity_tokens // capacity))

    def _vacate(self, place: Place) -> None:
        """Free a slab; a pool without any gives its memory back."""
        pool = place.pool
        pool.release(place.slot, place.written)
        if pool.empty:
            self._pools[pool.capacity].remove(pool)
