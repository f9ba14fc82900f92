"""Contiguous slabs, the KV memory of CPUs: each sequence owns one slab, in a pool of its size.

A pool has slabs of one capacity, side by side in one tensor, so that many sequences decode in one matrix product.
Memory behind a sequence's last position is zero: it is read with weight 0, and 0 · NaN is NaN.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import structlog
import torch
from torch import Tensor

from control.errors import NotMappable
from control.replicas.health.memory import in_words
from worker.kv import dense
from worker.kv.base import CacheLayout, Extent, Variant
from worker.kv.states import State, States
from worker.native.zeros import zeros
from worker.tensors import as_tensor, number_type

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
            return as_tensor(zeros(math.prod(shape), number_type(layout.dtype), large=False)).view(shape)
        return torch.zeros(shape, dtype=layout.dtype, device=layout.device)

    def _views(self) -> None:
        layers = [self.memories[group][place] for group, place in self.layout.places]
        self.keys, self.values = [layer[0] for layer in layers], [layer[1] for layer in layers]


CALL_BYTES = 512 * 1024
"""Reading so much takes about as long as one more call for a part of the batch."""


@dataclass
class Slab:
    """A sequence's slab. `written` counts the positions from 0 that may hold something else than zero."""

    pool: Pool
    slot: int
    written: int


class SlabStep:
    """Indices and masks are built once per step, where torch attends, and shared by the layers."""

    def __init__(
        self, layout: CacheLayout, extents: list[Extent], slabs: list[Slab], states: Sequence[State] = ()
    ) -> None:
        self._layout, self.extents, self.slabs = layout, extents, slabs
        self.states = states
        """By extent; empty for a model without recurrent layers."""

    @functools.cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((extent.count for extent in self.extents), initial=0))

    @functools.cached_property
    def _by_pool(self) -> list[list[int]]:
        by_pool: dict[int, list[int]] = {}
        for index, slab in enumerate(self.slabs):
            by_pool.setdefault(id(slab.pool), []).append(index)
        return list(by_pool.values())

    @functools.cached_property
    def _writes(self) -> list[_Write]:
        return [_Write(self._layout, self.extents, self.slabs, self._starts, members) for members in self._by_pool]

    @functools.cached_property
    def _decodes(self) -> list[_Decode]:
        layout, extents, slabs = self._layout, self.extents, self.slabs
        return [
            _Decode(layout, extents, slabs, self._starts, run)
            for members in self._by_pool
            for run in _runs(layout, extents, slabs, [index for index in members if extents[index].count == 1])
        ]

    @functools.cached_property
    def _prefills(self) -> list[_Prefill]:
        return [
            _Prefill(extent, slab, start)
            for extent, slab, start in zip(self.extents, self.slabs, self._starts, strict=False)
            if extent.count > 1
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        if self._layout.layers[layer].source is None:
            for write in self._writes:
                write.store(layer, key, value)
        if len(self._decodes) == 1 and self._decodes[0].whole:
            return self._decodes[0].attend(layer, query, variant)
        heads, tokens, dim = query.shape
        out = query.new_empty(tokens, heads, dim)
        for decode in self._decodes:
            out.index_copy_(0, decode.rows, decode.attend(layer, query, variant))
        for prefill in self._prefills:
            out[prefill.start : prefill.stop] = prefill.attend(layer, query, variant)
        return out


def _runs(layout: CacheLayout, extents: list[Extent], slabs: list[Slab], members: list[int]) -> list[list[int]]:
    """`members`, all of one pool, in the order of their slots, cut where reading the idle slots between two of them
    would take longer than another call."""
    ordered = sorted(members, key=lambda index: slabs[index].slot)
    longest = max((extents[index].end for index in members), default=0)
    widest = max(layer.kv_heads * layer.head_dim for layer in layout.layers)
    idle_bytes = 2 * widest * longest * layout.dtype.itemsize
    runs: list[list[int]] = []
    last = 0
    for index in ordered:
        slot = slabs[index].slot
        if runs and (slot - last - 1) * idle_bytes <= CALL_BYTES:
            runs[-1].append(index)
        else:
            runs.append([index])
        last = slot
    return runs


class _Write:
    """The new tokens of one pool as rows of its memory seen as (slots · kv heads · capacity, head dim)."""

    def __init__(
        self, layout: CacheLayout, extents: list[Extent], slabs: list[Slab], starts: list[int], members: list[int]
    ) -> None:
        self.pool = slabs[members[0]].pool
        tokens: list[int] = []
        places: list[tuple[int, int]] = []
        for index in members:
            extent, start = extents[index], starts[index]
            tokens.extend(range(start, start + extent.count))
            places.extend((slabs[index].slot, position) for position in range(extent.offset, extent.end))
        self._places = torch.tensor(places, device=layout.device)
        """Slot and position of each token."""
        self._targets: dict[int, Tensor] = {}
        whole = len(tokens) == starts[-1]
        self.tokens = None if whole else torch.tensor(tokens, device=layout.device)

    def _target(self, kv_heads: int) -> Tensor:
        """The rows of the tokens' heads in a memory of so many heads."""
        if kv_heads not in self._targets:
            slots, positions = self._places.unbind(1)
            heads = torch.arange(kv_heads, device=slots.device) + (slots * kv_heads).unsqueeze(1)
            self._targets[kv_heads] = (heads * self.pool.capacity + positions.unsqueeze(1)).flatten()
        return self._targets[kv_heads]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        target = self._target(key.shape[0])
        for memory, new in ((self.pool.keys[layer], key), (self.pool.values[layer], value)):
            rows = new.transpose(0, 1)
            if self.tokens is not None:
                rows = rows.index_select(0, self.tokens)
            dim = memory.shape[-1]
            memory.view(-1, dim).index_copy_(0, target, rows.reshape(-1, dim))


class _Decode:
    """Sequences of one pool that add one token each, attended in one padded batch: the slots from the first one's to
    the last one's, those between them that are not asked for included."""

    def __init__(
        self, layout: CacheLayout, extents: list[Extent], slabs: list[Slab], starts: list[int], members: list[int]
    ) -> None:
        """`members` are in the order of their slots."""
        self.pool = slabs[members[0]].pool
        slots = [slabs[index].slot for index in members]
        offsets = [extents[index].offset for index in members]
        rows = [starts[index] for index in members]
        self.rows = torch.tensor(rows, device=layout.device)
        self.whole = rows == list(range(starts[-1]))
        """True if these rows are the whole batch, in its order."""
        self._front = slice(slots[0], slots[-1] + 1)
        self._lowest, self._longest = min(offsets), max(offsets) + 1
        self._asked, self._busy = self.rows, None
        self._positions = torch.tensor(offsets, device=layout.device)
        if slots[-1] - slots[0] >= len(slots):
            # Slot → member; an idle slot repeats the first member and its result is not read.
            member = [0] * (slots[-1] + 1 - slots[0])
            for number, slot in enumerate(slots):
                member[slot - slots[0]] = number
            self._asked = self.rows[member]
            self._positions = self._positions[member]
            self._busy = torch.tensor([slot - slots[0] for slot in slots], device=layout.device)
        self._biases: dict[int | None, Tensor | None] = {}

    def attend(self, layer: int, query: Tensor, variant: Variant) -> Tensor:
        """query (heads, T, dim) of the whole batch → (members, heads, dim), in the members' order."""
        first = 0 if variant.window is None else max(0, self._lowest + 1 - variant.window)
        key = self.pool.keys[layer][self._front, :, first : self._longest]
        value = self.pool.values[layer][self._front, :, first : self._longest]
        asked = query.transpose(0, 1)
        if not (self.whole and self._busy is None):
            asked = asked.index_select(0, self._asked)
        out = dense.decode(asked, key, value, self._bias(variant.window, first, query), variant)
        return out if self._busy is None else out.index_select(0, self._busy)

    def _bias(self, window: int | None, first: int, like: Tensor) -> Tensor | None:
        if window not in self._biases:
            even = self._lowest + 1 == self._longest
            self._biases[window] = (
                None if even else dense.length_bias(self._positions, first, self._longest, window, like)
            )
        return self._biases[window]


class _Prefill:
    """One sequence's chunk of two tokens or more."""

    def __init__(self, extent: Extent, slab: Slab, start: int) -> None:
        self.extent, self.slab = extent, slab
        self.start, self.stop = start, start + extent.count
        self._biases: dict[int | None, Tensor | None] = {}

    def attend(self, layer: int, query: Tensor, variant: Variant) -> Tensor:
        extent, slot = self.extent, self.slab.slot
        first = 0 if variant.window is None else max(0, extent.offset + 1 - variant.window)
        key = self.slab.pool.keys[layer][slot, :, first : extent.end]
        value = self.slab.pool.values[layer][slot, :, first : extent.end]
        asked = query[:, self.start : self.stop]
        return dense.prefill(asked, key, value, self._bias(variant, first, query), variant)

    def _bias(self, variant: Variant, first: int, like: Tensor) -> Tensor | None:
        window = variant.window
        if window not in self._biases:
            extent, ends = self.extent, None if variant.ends is None else variant.ends[self.start : self.stop]
            simple = ends is None and extent.offset == 0 and (window is None or window >= extent.count)
            self._biases[window] = (
                None
                if simple
                else dense.causal_bias(extent.offset, extent.count, first, extent.end, window, like, ends)
            )
        return self._biases[window]


log = structlog.get_logger()

FIRST_CAPACITY = 256
"""Positions of the smallest slab. Each further pool's are twice as long, so a long sequence moves seldom."""

OVERHEAD = 2
"""Bytes that may be touched per byte of cached tokens: while a pool doubles, its old and its new copy both exist."""


def tokens_that_fit(free_bytes: int, layout: CacheLayout) -> int:
    """How many cached tokens to promise for so much free memory."""
    return max(0, free_bytes) // (OVERHEAD * layout.bytes_per_token)


LIMITS = "`ulimit -v`, vm.overcommit_memory"
"""What may keep a process from mapping memory that is free."""


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
    while tokens and not _maps(layout, min(tokens, context)):
        longest = min(tokens, context)
        tokens = longest // 2 if longest > FIRST_CAPACITY else 0
    return tokens


def check_mappable(layout: CacheLayout, tokens: int, context: int) -> None:
    """Raise NotMappable where the slab of the longest sequence can't be mapped with `tokens` cached tokens."""
    most = mappable_tokens(layout, tokens, context)
    if 0 < most < tokens:
        longest = min(tokens, context)
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

    block_tokens = 1
    supports_prefix_sharing = True

    def __init__(self, layout: CacheLayout, capacity_tokens: int) -> None:
        self.layout, self.capacity_tokens = layout, capacity_tokens
        self.state_tokens = layout.state_tokens
        self._states = None if layout.state is None else States(layout)
        self._pools: dict[int, list[Pool]] = {}
        """The pools by capacity."""
        self._slabs: dict[int, Slab] = {}
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
        return tokens + self.state_tokens if tokens else 0

    def held(self, sid: int) -> int:
        copies = 0 if self._states is None else self._states.snapshots(sid)
        return self.rounded(self._lengths.get(sid, 0)) + self.state_tokens * copies

    def snapshot(self, sid: int) -> None:
        if self._states is None:
            raise RuntimeError("this model has no recurrent states")
        self._states.snapshot(sid, self._lengths[sid])

    def drop_snapshots(self, sid: int) -> None:
        if self._states is not None:
            self._states.drop_snapshots(sid)

    def can_fork(self, donor: int, count: int) -> bool:
        return self._states is None or self._states.at(donor, count, self._lengths[donor]) is not None

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
                slab.pool.clear(slab.slot, extent.end, slab.written)
                slab.written = extent.end
            if self._states is not None:
                self._states.commit(extent.sid)

    def fork(self, sid: int, donor: int, count: int, *, take_over: bool, snapshots: bool = False) -> None:
        slab = self._slabs[donor]
        if self._states is not None:
            self._states.fork(sid, donor, count, self._lengths[donor], snapshots=snapshots)
            if take_over:
                self._states.drop(donor)
        if take_over:
            self._slabs[sid] = self._slabs.pop(donor)
            del self._lengths[donor]
            slab.pool.clear(slab.slot, count, slab.written)
            slab.written = min(count, slab.written)
        else:
            self._slabs[sid] = self._copy(slab, count, count + 1)
        self._lengths[sid] = count

    def drop(self, sid: int) -> None:
        self._lengths.pop(sid, None)
        if self._states is not None:
            self._states.drop(sid)
        if (slab := self._slabs.pop(sid, None)) is not None:
            self._vacate(slab)

    def clear(self) -> None:
        if self._states is not None:
            self._states.clear()
        self._pools.clear()
        self._slabs.clear()
        self._lengths.clear()

    def _reserve(self, extent: Extent) -> None:
        slab = self._slabs.get(extent.sid)
        if slab is None:
            slab = self._slabs[extent.sid] = self._take(extent.end)
        elif extent.end > slab.pool.capacity:
            self._slabs[extent.sid] = self._copy(slab, extent.offset, extent.end)
            self._vacate(slab)
            slab = self._slabs[extent.sid]
        # Marked before the forward: should it fail half way, what it wrote is still cleared when the slab is given up.
        slab.written = max(slab.written, extent.end)

    def _copy(self, slab: Slab, count: int, length: int) -> Slab:
        """A new slab for `length` positions, the first `count` as in `slab`."""
        copy = self._take(length)
        slab.pool.copy_to(slab.slot, copy.pool, copy.slot, count)
        copy.written = count
        return copy

    def _take(self, length: int) -> Slab:
        """A slab of zeros for `length` positions."""
        capacity = slab_capacity(length, self.capacity_tokens)
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
