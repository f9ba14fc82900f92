"""The store of contiguous slabs: each sequence owns one slab, in the pool of its size."""

from __future__ import annotations

from collections.abc import Iterable

from worker.kv.base import CacheLayout, Extent
from worker.kv.pool import Pool
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

    def __init__(self, layout: CacheLayout, capacity_tokens: int) -> None:
        self.layout, self.capacity_tokens = layout, capacity_tokens
        self._pools: dict[int, Pool] = {}
        self._places: dict[int, Place] = {}
        self._lengths: dict[int, int] = {}

    @property
    def used_tokens(self) -> int:
        return sum(self._lengths.values())

    @property
    def reserved_bytes(self) -> int:
        """Address space of all pools; on a CPU only what was written is resident."""
        return sum(pool.slots * pool.capacity for pool in self._pools.values()) * self.layout.bytes_per_token

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
            pool = self._pool(extent.end)
            place = self._places[extent.sid] = Place(pool, pool.take(extent.sid), 0)
        elif extent.end > place.pool.capacity:
            larger = self._pool(extent.end)
            slot = larger.take(extent.sid)
            place.pool.copy_to(place.slot, larger, slot, extent.offset)
            self._vacate(place)
            place = self._places[extent.sid] = Place(larger, slot, extent.offset)
        # Marked before the forward: should it fail half way, what it wrote is still cleared when the slab is given up.
        place.written = max(place.written, extent.end)

    def _vacate(self, place: Place) -> None:
        pool = place.pool
        last = pool.owners[-1]
        last_used = self._places[last].written if last in self._places else place.written
        moved = pool.release(place.slot, place.written, last_used)
        if moved is not None:
            self._places[moved].slot = place.slot

    def _pool(self, length: int) -> Pool:
        capacity = FIRST_CAPACITY
        while capacity < length:
            capacity *= 2
        if capacity not in self._pools:
            self._pools[capacity] = Pool(self.layout, capacity)
        return self._pools[capacity]
