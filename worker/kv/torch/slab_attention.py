"""torch's attention over the slabs of CPUs, for the models that torch computes.

Indices and masks are built once per step and shared by the layers.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from worker.kv.base import CacheLayout, Extent, Variant
from worker.kv.slabs import Pool, Slab, SlabStep
from worker.kv.states import State
from worker.kv.torch import plain_attention
from worker.tensors import as_tensor

CALL_BYTES = 512 * 1024
"""Reading so much takes about as long as one more call for a part of the batch."""


class StateTensors:
    """A recurrent state as tensors over its memory."""

    def __init__(self, state: State) -> None:
        self._state = state

    def window(self, layer: int) -> Tensor:
        """The last inputs of the convolution of the recurrent layer `layer`: (window, channels)."""
        return as_tensor(self._state.window(layer))

    def matrices(self, layer: int) -> Tensor:
        """The matrices of the recurrent layer `layer`: (heads, key dim, value dim)."""
        return as_tensor(self._state.matrices(layer))


class PoolTensors:
    """A pool's memory as tensors. `keys` and `values` have one for each layer of the model, (slots, kv heads,
    capacity, head dim)."""

    def __init__(self, pool: Pool) -> None:
        self.capacity = pool.capacity
        memories = [as_tensor(memory) for memory in pool.memories]
        layers = [memories[group][place] for group, place in pool.layout.places]
        self.keys = [layer[0] for layer in layers]
        self.values = [layer[1] for layer in layers]


class SlabAttention:
    """One step's attention."""

    def __init__(self, step: SlabStep) -> None:
        self._layout = step.layout
        self.extents = step.extents
        self._slabs = step.slabs
        self.states = [StateTensors(state) for state in step.states]
        """By extent; empty for a model without recurrent layers."""

    @functools.cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((extent.count for extent in self.extents), initial=0))

    @functools.cached_property
    def _by_pool(self) -> list[tuple[PoolTensors, list[int]]]:
        """Each pool, and the indices of its extents."""
        by_pool: dict[int, tuple[PoolTensors, list[int]]] = {}
        for index, slab in enumerate(self._slabs):
            if id(slab.pool) not in by_pool:
                by_pool[id(slab.pool)] = PoolTensors(slab.pool), []
            by_pool[id(slab.pool)][1].append(index)
        return list(by_pool.values())

    @functools.cached_property
    def _writes(self) -> list[_Write]:
        return [_Write(pool, self.extents, self._slabs, self._starts, members) for pool, members in self._by_pool]

    @functools.cached_property
    def _decodes(self) -> list[_Decode]:
        layout = self._layout
        extents = self.extents
        slabs = self._slabs
        return [
            _Decode(pool, extents, slabs, self._starts, run)
            for pool, members in self._by_pool
            for run in _runs(layout, extents, slabs, [index for index in members if extents[index].count == 1])
        ]

    @functools.cached_property
    def _prefills(self) -> list[_Prefill]:
        return [
            _Prefill(pool, self.extents[index], self._slabs[index].slot, self._starts[index])
            for pool, members in self._by_pool
            for index in members
            if self.extents[index].count > 1
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
        self, pool: PoolTensors, extents: list[Extent], slabs: list[Slab], starts: list[int], members: list[int]
    ) -> None:
        self.pool = pool
        tokens: list[int] = []
        places: list[tuple[int, int]] = []
        for index in members:
            extent = extents[index]
            start = starts[index]
            tokens.extend(range(start, start + extent.count))
            places.extend((slabs[index].slot, position) for position in range(extent.offset, extent.end))
        self._places = torch.tensor(places)
        """Slot and position of each token."""
        self._targets: dict[int, Tensor] = {}
        whole = len(tokens) == starts[-1]
        self.tokens = None if whole else torch.tensor(tokens)

    def _target(self, kv_heads: int) -> Tensor:
        """The rows of the tokens' heads in a memory of so many heads."""
        if kv_heads not in self._targets:
            slots, positions = self._places.unbind(1)
            heads = torch.arange(kv_heads) + (slots * kv_heads).unsqueeze(1)
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
        self, pool: PoolTensors, extents: list[Extent], slabs: list[Slab], starts: list[int], members: list[int]
    ) -> None:
        """`members` are in the order of their slots."""
        self.pool = pool
        slots = [slabs[index].slot for index in members]
        offsets = [extents[index].offset for index in members]
        rows = [starts[index] for index in members]
        self.rows = torch.tensor(rows)
        self.whole = rows == list(range(starts[-1]))
        """True if these rows are the whole batch, in its order."""
        self._front = slice(slots[0], slots[-1] + 1)
        self._lowest, self._longest = min(offsets), max(offsets) + 1
        self._query_rows = self.rows
        self._busy = None
        self._positions = torch.tensor(offsets)
        if slots[-1] - slots[0] >= len(slots):
            # Slot → member; an idle slot repeats the first member and its result is not read.
            member = [0] * (slots[-1] + 1 - slots[0])
            for number, slot in enumerate(slots):
                member[slot - slots[0]] = number
            self._query_rows = self.rows[member]
            self._positions = self._positions[member]
            self._busy = torch.tensor([slot - slots[0] for slot in slots])
        self._biases: dict[tuple[int | None, bool], Tensor | None] = {}

    def attend(self, layer: int, query: Tensor, variant: Variant) -> Tensor:
        """query (heads, T, dim) of the whole batch → (members, heads, dim), in the members' order."""
        first = 0 if variant.window is None else max(0, self._lowest + 1 - variant.window)
        key = self.pool.keys[layer][self._front, :, first : self._longest]
        value = self.pool.values[layer][self._front, :, first : self._longest]
        queries = query.transpose(0, 1)
        if not (self.whole and self._busy is None):
            queries = queries.index_select(0, self._query_rows)
        out = plain_attention.decode(queries, key, value, self._bias(variant, first, query), variant)
        return out if self._busy is None else out.index_select(0, self._busy)

    def _bias(self, variant: Variant, first: int, like: Tensor) -> Tensor | None:
        window, chunked = form = variant.window, variant.chunked
        if form not in self._biases:
            even = self._lowest + 1 == self._longest and not chunked
            self._biases[form] = (
                None
                if even
                else plain_attention.length_bias(self._positions, first, self._longest, window, like, chunked)
            )
        return self._biases[form]


class _Prefill:
    """One sequence's chunk of two tokens or more."""

    def __init__(self, pool: PoolTensors, extent: Extent, slot: int, start: int) -> None:
        self.pool = pool
        self.extent = extent
        self.slot = slot
        self.start = start
        self.stop = start + extent.count
        self._biases: dict[tuple[int | None, bool], Tensor | None] = {}

    def attend(self, layer: int, query: Tensor, variant: Variant) -> Tensor:
        extent = self.extent
        first = 0 if variant.window is None else max(0, extent.offset + 1 - variant.window)
        key = self.pool.keys[layer][self.slot, :, first : extent.end]
        value = self.pool.values[layer][self.slot, :, first : extent.end]
        queries = query[:, self.start : self.stop]
        return plain_attention.prefill(queries, key, value, self._bias(variant, first, query), variant)

    def _bias(self, variant: Variant, first: int, like: Tensor) -> Tensor | None:
        window, chunked = form = variant.window, variant.chunked
        if form not in self._biases:
            extent = self.extent
            ends = None if variant.ends is None else variant.ends[self.start : self.stop]
            simple = ends is None and extent.offset == 0 and (window is None or window >= extent.count)
            self._biases[form] = (
                None
                if simple
                else plain_attention.causal_bias(
                    extent.offset, extent.count, first, extent.end, window, like, ends, chunked
                )
            )
        return self._biases[form]
