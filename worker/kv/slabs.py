"""Contiguous slabs, the KV memory of CPUs: each sequence owns one slab, in a pool of its size.

A pool has slabs of one capacity, side by side in one array, so that many sequences decode in one matrix product.
Memory behind a sequence's last position is zero: it is read with weight 0, and 0 · NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from control.errors import NotMappable
from control.placement.need import FREED_TOKENS
from control.sizes import in_words
from worker.kv.base import DOUBLED_BYTES, Attention, CacheLayout, Extent
from worker.kv.states import State, States
from worker.native.memory import clear, discard, zeros

log = structlog.get_logger()

FIRST_SLOTS = 4
MOST_POSITIONS = 2**40
"""More than a sequence can have."""


class Pool:
    """Slabs of `capacity` positions. `memories` has an array (layers, parts, slots, kv heads, capacity, row) for each
    of the layout's groups."""

    def __init__(self, layout: CacheLayout, capacity: int, slots: int = FIRST_SLOTS) -> None:
        self.layout = layout
        self.capacity = capacity
        self.memories = self._allocate(slots)
        self._free = list(reversed(range(slots)))
        """Free slots, the lowest last: sequences that decode together lie together."""

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
        """Twice the slots; those there are stay what and where they are. Their memory is given back layer by layer:
        both copies never exist as a whole."""
        slots = self.slots
        larger = self._allocate(2 * slots)
        for new, old in zip(larger, self.memories, strict=True):
            for layer in range(len(old)):
                for part in range(old.shape[1]):
                    new[layer, part, :slots] = old[layer, part]
                    clear(old[layer, part])
        self.memories = larger
        self._free = [*reversed(range(slots, 2 * slots)), *self._free]

    def take(self) -> int:
        """The lowest free slot, zeroed. Raises IndexError where the pool is full."""
        return self._free.pop()

    def release(self, slot: int, length: int) -> None:
        """Free `slot`, of which the first `length` positions were written, and give its memory back: another pool may
        need it. Throw a pool away that is empty after this."""
        self._free = sorted([*self._free, slot], reverse=True)
        if self.empty or not length:
            return
        for memory in self.memories:
            for layer in range(len(memory)):
                for part in range(memory.shape[1]):
                    clear(memory[layer, part, slot])

    def clear(self, slot: int, start: int, stop: int, freed: int = 0) -> None:
        """Zero positions [start, stop) of a slot, in layers with windows but for the first `freed` of the slot: writing
        would take their memory again."""
        for memory, first in zip(self.memories, self._starts(freed), strict=True):
            memory[:, :, slot, :, max(start, first) : stop] = 0

    @property
    def windowed(self) -> list[NDArray[Any]]:
        """The memories of the groups with windows."""
        groups = self.layout.groups
        return [memory for memory, group in zip(self.memories, groups, strict=True) if group.window is not None]

    def free(self, slot: int, start: int, stop: int) -> None:
        """Give the memory of the positions [start, stop) of a slot back in the layers with windows, and of those before
        them: the last page may not have been free as a whole."""
        for memory in self.windowed:
            for layer, part, head in np.ndindex(*memory.shape[:2], memory.shape[3]):
                discard(memory[layer, part, slot, head, max(0, start - FREED_TOKENS) : stop])

    def copy_to(self, slot: int, other: Pool, other_slot: int, length: int, first: int) -> None:
        """Copy the first `length` positions of a slot into a slab of this or another pool; in layers with windows those
        from `first` on."""
        for to, memory, start in zip(other.memories, self.memories, self._starts(first), strict=True):
            to[:, :, other_slot, :, start:length] = memory[:, :, slot, :, start:length]

    def move_to(self, slot: int, other: Pool, other_slot: int, length: int, first: int) -> None:
        """As `copy_to`, and give the memory of the slot back layer by layer: both copies never exist as a whole."""
        for to, memory, start in zip(other.memories, self.memories, self._starts(first), strict=True):
            for layer in range(len(memory)):
                for part in range(memory.shape[1]):
                    to[layer, part, other_slot, :, start:length] = memory[layer, part, slot, :, start:length]
                    clear(memory[layer, part, slot])

    def _starts(self, first: int) -> list[int]:
        return [0 if group.window is None else first for group in self.layout.groups]

    def _allocate(self, slots: int) -> list[NDArray[Any]]:
        # Small pages: a short sequence in a long slab shall take no more memory than was promised for its tokens.
        layout = self.layout
        shapes = [
            (len(group.layers), group.parts, slots, group.kv_heads, self.capacity, layout.row(group.head_dim))
            for group in layout.groups
        ]
        return [zeros(math.prod(shape), layout.element, large=False).reshape(shape) for shape in shapes]


@dataclass
class Slab:
    """A sequence's slab. `written` counts the positions from 0 that may hold something else than zero; in layers with
    windows the first `freed` of them are gone."""

    pool: Pool
    slot: int
    written: int
    freed: int = 0

    def parts(self, start: int, stop: int) -> list[NDArray[Any]]:
        """Copies of the positions [start, stop) in the layers with windows."""
        return [memory[:, :, self.slot, :, start:stop].copy() for memory in self.pool.windowed]

    def put(self, start: int, parts: list[NDArray[Any]]) -> None:
        """Write what `parts` gave from the position `start` on."""
        for memory, part in zip(self.pool.windowed, parts, strict=True):
            memory[:, :, self.slot, :, start : start + part.shape[3]] = part


@dataclass(frozen=True)
class SlabStep:
    """One step's sequences and where they lie."""

    layout: CacheLayout
    extents: list[Extent]
    slabs: list[Slab]
    states: Sequence[State] = ()
    """By extent; empty for a model without recurrent layers."""

    @property
    def attention(self) -> Attention:
        from worker.kv.torch.slab_attention import SlabAttention  # only here: torch attends, and C++ does without it

        return SlabAttention(self)


FIRST_CAPACITY = 256
"""Positions of the smallest slab. Each further pool's are twice as long, so a long sequence moves seldom."""

OVERHEAD = 2
"""Bytes that may be touched per byte of cached tokens: while a pool doubles, its old and its new copy both exist."""


def tokens_that_fit(free_bytes: int, layout: CacheLayout) -> int:
    """The number of cached tokens to promise for so much free memory."""
    return max(0, free_bytes) // (OVERHEAD * layout.bytes_per_token)


LIMITS = "`ulimit -v`, vm.overcommit_memory"
"""Limits that may keep a process from mapping free memory."""


def slab_capacity(length: int, most: int) -> int:
    """Positions of the smallest slab that holds `length`; more than the `most` that a sequence can have only where
    `length` is more."""
    capacity = FIRST_CAPACITY
    while capacity < length:
        capacity *= 2
    whole = -(-max(length, most) // FIRST_CAPACITY) * FIRST_CAPACITY
    return min(capacity, whole)


def mappable_tokens(layout: CacheLayout, tokens: int, context: int) -> int:
    """The most cached tokens, at most `tokens`, for which a slab of the longest possible sequence can be mapped beside
    the slab that it grows from. A sequence has at most `context` positions. Nothing is written: this takes address
    space for a moment, and no memory."""
    while tokens and not _maps(layout, longest := layout.cost.longest(tokens, context)):
        tokens = min(tokens, longest) // 2 if longest > FIRST_CAPACITY else 0
    return tokens


def check_mappable(layout: CacheLayout, tokens: int, context: int) -> None:
    """Raise NotMappable where the slab of the longest sequence can't be mapped with `tokens` cached tokens."""
    most = mappable_tokens(layout, tokens, context)
    if 0 < most < tokens:
        longest = layout.cost.longest(tokens, context)
        raise NotMappable(
            f"--kv-tokens {tokens}: a sequence of {longest} tokens needs {in_words(longest * layout.bytes_per_token)} "
            f"of address space on each rank, and this host maps memory for {most} tokens only. Use --kv-tokens {most} "
            f"or fewer, or raise the limit ({LIMITS})."
        )
    if not most:
        size = in_words(FIRST_CAPACITY * layout.bytes_per_token)
        raise NotMappable(
            f"no KV memory can be mapped on this host: it refuses {size} for {FIRST_CAPACITY} tokens. Raise the limit "
            f"({LIMITS}), or load the model with --quant."
        )


def _maps(layout: CacheLayout, longest: int) -> bool:
    """True if a slab for `longest` positions can be mapped beside one for half of them."""
    try:
        pools = [Pool(layout, slab_capacity(length, longest), 1) for length in (longest // 2, longest)]
    except OSError:
        return False
    return bool(pools)


class SlabStore:
    """Cached keys and values on one device, bounded by `capacity_tokens`."""

    supports_prefix_sharing = True

    def __init__(self, layout: CacheLayout, capacity_tokens: int) -> None:
        self.layout = layout
        self.capacity_tokens = capacity_tokens
        self.cost = layout.cost
        self._longest = self.cost.longest(capacity_tokens, MOST_POSITIONS)
        self._states = None if layout.state is None else States(layout)
        self._pools: dict[int, list[Pool]] = {}
        """The pools by capacity."""
        self._slabs: dict[int, Slab] = {}
        self._copies: dict[int, dict[int, list[NDArray[Any]]]] = {}
        """Sequence → position → what layers with windows keep of it there."""
        self._lengths: dict[int, int] = {}

    @property
    def used_tokens(self) -> int:
        return sum(self.held(sid) for sid in self._lengths)

    @property
    def reserved_bytes(self) -> int:
        """Address space of all pools; on a CPU only what was written is resident."""
        pools = [pool for siblings in self._pools.values() for pool in siblings]
        return sum(pool.slots * pool.capacity for pool in pools) * self.layout.bytes_per_token

    def rounded(self, tokens: int) -> int:
        return self.cost.rounded(tokens)

    def held(self, sid: int) -> int:
        copies = len(self._copies.get(sid, ())) if self._states is None else self._states.snapshots(sid)
        return self.rounded(self._lengths.get(sid, 0)) + self.cost.copy_tokens * copies

    def snapshot(self, sid: int) -> None:
        if not self.cost.copy_tokens:
            raise RuntimeError("this model has neither recurrent states nor windows")
        length = self._lengths[sid]
        if self._states is not None:
            self._states.snapshot(sid, length)
        if self.cost.window:
            slab = self._slabs[sid]
            self._copies.setdefault(sid, {})[length] = slab.parts(max(slab.freed, self.cost.freed(length)), length)

    def drop_snapshots(self, sid: int) -> None:
        if self._states is not None:
            self._states.drop_snapshots(sid)
        self._copies.pop(sid, None)

    def can_fork(self, donor: int, count: int) -> bool:
        if self._states is not None and self._states.at(donor, count, self._lengths[donor]) is None:
            return False
        return self._is_seen(self._slabs[donor], count) or count in self._copies.get(donor, ())

    def _is_seen(self, slab: Slab, count: int) -> bool:
        """True if the slab has all that a token at `count` sees in layers with windows."""
        return slab.freed <= max(0, count - self.cost.window)

    def length(self, sid: int) -> int | None:
        return self._lengths.get(sid)

    def begin(self, extents: list[Extent], beside: Iterable[Extent] = ()) -> SlabStep:
        for extent in extents:
            self._reserve(extent)
        states = [] if self._states is None else [self._states.begin(extent) for extent in extents]
        return SlabStep(self.layout, extents, [self._slabs[extent.sid] for extent in extents], states)

    def commit(self, extents: list[Extent]) -> None:
        for extent in extents:
            self._lengths[extent.sid] = extent.end
            slab = self._slabs[extent.sid]
            if slab.written > extent.end:  # guesses that were wrong
                slab.pool.clear(slab.slot, extent.end, slab.written, slab.freed)
                slab.written = extent.end
            if (freed := self.cost.freed(extent.end)) > slab.freed:
                slab.pool.free(slab.slot, slab.freed, freed)
                slab.freed = freed
            if self._states is not None:
                self._states.commit(extent.sid)

    def fork(self, sid: int, donor: int, count: int, *, take_over: bool, snapshots: bool = False) -> None:
        slab = self._slabs[donor]
        if self._states is not None:
            self._states.fork(sid, donor, count, self._lengths[donor], snapshots=snapshots)
            if take_over:
                self._states.drop(donor)
        parts = self._copies.get(donor, {}).get(count)
        if snapshots:
            theirs = self._copies.get(donor, {})
            ours = {position: theirs.pop(position) for position in list(theirs) if position <= count}
            self._copies |= {sid: ours} if ours else {}
        if take_over:
            self._slabs[sid] = self._slabs.pop(donor)
            del self._lengths[donor]
            self._copies.pop(donor, None)
            slab.pool.clear(slab.slot, count, slab.written, slab.freed)
            slab.written = min(count, slab.written)
        else:
            self._slabs[sid] = self._copy(slab, count, count + 1)
        if parts is not None and self.cost.window:
            first = count - parts[0].shape[3]
            self._slabs[sid].put(first, parts)
            self._slabs[sid].freed = first
        self._lengths[sid] = count

    def drop(self, sid: int) -> None:
        self._lengths.pop(sid, None)
        self._copies.pop(sid, None)
        if self._states is not None:
            self._states.drop(sid)
        if (slab := self._slabs.pop(sid, None)) is not None:
            self._vacate(slab)

    def clear(self) -> None:
        if self._states is not None:
            self._states.clear()
        self._pools.clear()
        self._slabs.clear()
        self._copies.clear()
        self._lengths.clear()

    def _reserve(self, extent: Extent) -> None:
        slab = self._slabs.get(extent.sid)
        if slab is None:
            slab = self._slabs[extent.sid] = self._take(extent.end)
        elif extent.end > slab.pool.capacity:
            slab = self._slabs[extent.sid] = self._moved(slab, extent.offset, extent.end)
        # Marked before the forward: should it fail half way, what it wrote is still cleared when the slab is given up.
        slab.written = max(slab.written, extent.end)

    def _copy(self, slab: Slab, count: int, length: int) -> Slab:
        """A new slab for `length` positions, the first `count` as in `slab`."""
        copy = self._take(length)
        copy.freed = min(count, max(slab.freed, self.cost.freed(count)))
        slab.pool.copy_to(slab.slot, copy.pool, copy.slot, count, copy.freed)
        copy.written = count
        return copy

    def _moved(self, slab: Slab, count: int, length: int) -> Slab:
        """A slab for `length` positions in place of `slab`, of which the first `count` are kept."""
        moved = self._take(length)
        slab.pool.move_to(slab.slot, moved.pool, moved.slot, count, slab.freed)
        moved.written, slab.written = count, 0
        moved.freed = slab.freed
        self._vacate(slab)
        return moved

    def _take(self, length: int) -> Slab:
        """A slab of zeros for `length` positions."""
        capacity = slab_capacity(length, self._longest)
        siblings = self._pools.setdefault(capacity, [])
        pool = next((pool for pool in siblings if not pool.full), None)
        if pool is None and siblings and siblings[-1].may_double:
            with suppress(OSError):  # where so much can't be mapped, a sibling may still be
                siblings[-1].double()
                pool = siblings[-1]
        if pool is None:
            pool = self._new_pool(capacity, self._slots(capacity, siblings))
            siblings.append(pool)
        return Slab(pool, pool.take(), 0)

    def _new_pool(self, capacity: int, slots: int) -> Pool:
        """A pool of `slots`, or of fewer where the kernel refuses to map so many. Raises OSError where it refuses one:
        the load has proved that one can be mapped, but a limit may have fallen, or other sequences have the rest."""
        while slots > 1:
            try:
                return Pool(self.layout, capacity, slots)
            except OSError as error:
                log.warning(
                    "a KV pool is mapped with fewer slots",
                    slots=slots,
                    bytes=slots * capacity * self.layout.bytes_per_token,
                    error=str(error),
                    action="kv_pool",
                )
                slots //= 2
        return Pool(self.layout, capacity, 1)

    def _slots(self, capacity: int, siblings: list[Pool]) -> int:
        """Of one more pool: as many as there are, so that pools stay few, but hardly more than could ever be filled."""
        slots = max(FIRST_SLOTS, sum(sibling.slots for sibling in siblings))
        if capacity == FIRST_CAPACITY:
            return slots
        return min(slots, max(1, 2 * self.capacity_tokens // capacity))

    def _vacate(self, slab: Slab) -> None:
        """Free a slab; a pool without any gives its memory back."""
        pool = slab.pool
        pool.release(slab.slot, slab.written)
        if pool.empty:
            self._pools[pool.capacity].remove(pool)
