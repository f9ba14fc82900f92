"""One step over slabs: where each new token's key goes, and which tokens attend together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.attention import dense
from worker.attention.variant import Variant
from worker.kv.base import CacheLayout, Extent
from worker.kv.pool import Pool


@dataclass
class Place:
    """A sequence's slab. `written` counts the positions from 0 that may hold something else than zero."""

    pool: Pool
    slot: int
    written: int


class SlabStep:
    """Built once per step and used by every layer: indices and masks are shared by the layers."""

    def __init__(self, layout: CacheLayout, extents: list[Extent], places: list[Place]) -> None:
        starts = [0]
        for extent in extents:
            starts.append(starts[-1] + extent.count)
        by_pool: dict[int, list[int]] = {}
        for index, place in enumerate(places):
            by_pool.setdefault(place.pool.capacity, []).append(index)
        self._writes = [_Write(layout, extents, places, starts, members) for members in by_pool.values()]
        self._decodes: list[_Decode] = []
        for members in by_pool.values():
            if single := [index for index in members if extents[index].count == 1]:
                self._decodes.append(_Decode(layout, extents, places, starts, single))
        self._prefills = [
            _Prefill(extent, place, start)
            for extent, place, start in zip(extents, places, starts, strict=False)
            if extent.count > 1
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        for write in self._writes:
            write.store(layer, key, value)
        if len(self._decodes) == 1 and not self._prefills:
            return self._decodes[0].attend(layer, query, variant)
        heads, tokens, dim = query.shape
        out = query.new_empty(tokens, heads, dim)
        for decode in self._decodes:
            out.index_copy_(0, decode.rows, decode.attend(layer, query, variant))
        for prefill in self._prefills:
            out[prefill.start : prefill.stop] = prefill.attend(layer, query, variant)
        return out


class _Write:
    """The new tokens of one pool as rows of its memory seen as (slots · kv heads · capacity, head dim)."""

    def __init__(
        self, layout: CacheLayout, extents: list[Extent], places: list[Place], starts: list[int], members: list[int]
    ) -> None:
        self.pool = places[members[0]].pool
        tokens: list[int] = []
        first_heads: list[int] = []
        for index in members:
            extent, start = extents[index], starts[index]
            tokens.extend(range(start, start + extent.count))
            base = places[index].slot * layout.kv_heads * self.pool.capacity
            first_heads.extend(range(base + extent.offset, base + extent.end))
        heads = torch.arange(layout.kv_heads, device=layout.device) * self.pool.capacity
        self.target = (torch.tensor(first_heads, device=layout.device).unsqueeze(1) + heads).flatten()
        whole = len(tokens) == starts[-1]
        self.tokens = None if whole else torch.tensor(tokens, device=layout.device)

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        for memory, new in ((self.pool.keys[layer], key), (self.pool.values[layer], value)):
            rows = new.transpose(0, 1)
            if self.tokens is not None:
                rows = rows.index_select(0, self.tokens)
            dim = memory.shape[-1]
            memory.view(-1, dim).index_copy_(0, self.target, rows.reshape(-1, dim))


class _Decode:
    """The sequences of one pool that add one token each, attended in one padded batch."""

    def __init__(
        self, layout: CacheLayout, extents: list[Extent], places: list[Place], starts: list[int], members: list[int]
    ) -> None:
        self.pool = places[members[0]].pool
        self.rows = torch.tensor([starts[index] for index in members], device=layout.device)
        slots = [places[index].slot for index in members]
        offsets = [extents[index].offset for index in members]
        self._everyone = len(members) == starts[-1]
        self._lowest, self._longest = min(offsets), max(offsets) + 1
        occupied = len(self.pool)
        if len(members) == 1:
            self._front: slice | None = slice(slots[0], slots[0] + 1)
            self._ordered = True
        else:
            # Attending the whole front costs the idle slots' share, gathering costs a copy of the busy ones.
            self._front = slice(0, occupied) if 2 * len(members) >= occupied else None
            self._ordered = self._front is None or slots == list(range(occupied))
        self._slots = torch.tensor(slots, device=layout.device)
        self._positions = torch.tensor(offsets, device=layout.device)
        if not self._ordered:
            # Slot → member; an idle slot repeats the first member and its result is not read.
            member = [0] * occupied
            for number, slot in enumerate(slots):
                member[slot] = number
            self._member_of_slot = torch.tensor(member, device=layout.device)
            self._positions = self._positions[self._member_of_slot]
        self._biases: dict[int | None, Tensor | None] = {}

    def attend(self, layer: int, query: Tensor, variant: Variant) -> Tensor:
        """query (heads, T, dim) of the whole batch → (members, heads, dim), in the members' order."""
        first = 0 if variant.window is None else max(0, self._lowest + 1 - variant.window)
        key, value = self._slice(self.pool.keys[layer], first), self._slice(self.pool.values[layer], first)
        asked = query.transpose(0, 1)
        if not self._everyone:
            asked = asked.index_select(0, self.rows)
        if not self._ordered:
            asked = asked.index_select(0, self._member_of_slot)
        out = dense.decode(asked, key, value, self._bias(variant.window, first, query), variant)
        return out if self._ordered else out.index_select(0, self._slots)

    def _slice(self, memory: Tensor, first: int) -> Tensor:
        if self._front is None:
            return memory.index_select(0, self._slots)[:, :, first : self._longest]
        return memory[self._front, :, first : self._longest]

    def _bias(self, window: int | None, first: int, like: Tensor) -> Tensor | None:
        if window not in self._biases:
            even = self._lowest + 1 == self._longest
            self._biases[window] = (
                None if even else dense.length_bias(self._positions, first, self._longest, window, like)
            )
        return self._biases[window]


class _Prefill:
    """One sequence's chunk of two tokens or more."""

    def __init__(self, extent: Extent, place: Place, start: int) -> None:
        self.extent, self.place = extent, place
        self.start, self.stop = start, start + extent.count
        self._biases: dict[int | None, Tensor | None] = {}

    def attend(self, layer: int, query: Tensor, variant: Variant) -> Tensor:
        extent, slot = self.extent, self.place.slot
        first = 0 if variant.window is None else max(0, extent.offset + 1 - variant.window)
        key = self.place.pool.keys[layer][slot, :, first : extent.end]
        value = self.place.pool.values[layer][slot, :, first : extent.end]
        asked = query[:, self.start : self.stop]
        return dense.prefill(asked, key, value, self._bias(variant.window, first, query), variant)

    def _bias(self, window: int | None, first: int, like: Tensor) -> Tensor | None:
        if window not in self._biases:
            extent = self.extent
            simple = extent.offset == 0 and (window is None or window >= extent.count)
            self._biases[window] = (
                None if simple else dense.causal_bias(extent.offset, extent.count, first, extent.end, window, like)
            )
        return self._biases[window]
