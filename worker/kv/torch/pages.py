"""Pages, the KV memory of GPUs: blocks of a fixed number of positions, assigned to sequences as they grow.

Keys of one layer are one tensor (blocks, kv heads, block tokens, dim), values alike. A sequence owns a row of `tables`;
entry i of it is the block of its positions i · block tokens and on. Nothing is moved: a sequence that grows gets
another block. Sequences with the same beginning share blocks; only a block that both continue is copied. Memory is not
cleared, as attention reads nothing behind a sequence's end.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from control.placement.need import KVCost
from worker.kv.base import CacheLayout, Extent, Stateless, Variant
from worker.tensors import torch_type


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The tokens of one step. Everything that a kernel reads is on the device, so that a graph can be replayed."""

    tables: Tensor
    """Block tables: (rows, width) int32."""
    owners: Tensor
    """(T,) int64: each token's row of `tables`, or -1 where it only fills up a bucket: it is not stored, and attends
    nothing."""
    positions: Tensor
    """(T,) int64: positions of the tokens in their sequences."""
    singles: Tensor
    """(B,) int64: the tokens of sequences that add one token."""
    chunks: tuple[tuple[int, int], ...] = ()
    """(first token, count) of each sequence that adds more than one."""
    _tiles: dict[int, Tensor] = field(default_factory=dict)

    def tiles(self, tokens: int) -> Tensor:
        """The chunks cut into pieces of at most `tokens`, (pieces, 2) int32: first token and count."""
        if tokens not in self._tiles:
            pieces = [
                (first + start, min(tokens, count - start))
                for first, count in self.chunks
                for start in range(0, count, tokens)
            ]
            self._tiles[tokens] = torch.tensor(pieces, dtype=torch.int32).to(self.owners.device, non_blocking=True)
        return self._tiles[tokens]


class PagedAttention(Protocol):
    """Stores the new keys and values into pages, then attends each token to its own sequence."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pages: tuple[Tensor, Tensor],
        batch: PagedBatch,
        variant: Variant,
    ) -> Tensor:
        """query (heads, T, dim), key and value (kv heads, T, dim), `pages` of keys and of values → (T, heads, dim)."""
        ...


class Blocks:
    """`count` blocks, numbered from 0, handed out by holder."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._blocks_by_holder: dict[int, list[int]] = {}
        self._holders: dict[int, int] = {}
        """The number of holders of each block that has more than one."""

    @property
    def free(self) -> int:
        return len(self._free)

    def of(self, holder: int) -> list[int]:
        return self._blocks_by_holder.get(holder, [])

    def grow(self, holder: int, length: int) -> list[tuple[int, int]]:
        """Let `holder` have `length` blocks; what was added, as (index, block). Raises ValueError if too few are free,
        with nothing changed."""
        blocks = self._blocks_by_holder.setdefault(holder, [])
        missing = length - len(blocks)
        if missing > len(self._free):
            raise ValueError(f"{missing} more blocks are needed, {len(self._free)} of {self.count} are free")
        first = len(blocks)
        blocks.extend(self._free.pop() for _ in range(missing))
        return list(enumerate(blocks[first:], first))

    def shrink(self, holder: int, length: int) -> None:
        """Take all but the first `length` blocks from `holder`; those that nobody else holds are free."""
        blocks = self._blocks_by_holder.get(holder, [])
        for block in blocks[length:]:
            other_holders = self._holders.pop(block, 1) - 1
            if other_holders == 0:
                self._free.append(block)
            elif other_holders > 1:
                self._holders[block] = other_holders
        del blocks[length:]
        if not blocks:
            self._blocks_by_holder.pop(holder, None)

    def share(self, donor: int, holder: int, length: int) -> None:
        """Let `holder`, which has none, hold the first `length` blocks of `donor` too."""
        shared = self._blocks_by_holder[donor][:length]
        for block in shared:
            self._holders[block] = self._holders.get(block, 1) + 1
        self._blocks_by_holder[holder] = list(shared)

    def rename(self, old: int, new: int) -> None:
        """Give all that `old` holds to `new`, which has none."""
        self._blocks_by_holder[new] = self._blocks_by_holder.pop(old)

    def separate(self, holder: int, index: int) -> tuple[int, int] | None:
        """Give `holder` a block of its own at `index`: (old, new) where others hold the old one too, else None."""
        old = self._blocks_by_holder[holder][index]
        other_holders = self._holders.get(old, 1) - 1
        if other_holders == 0:
            return None
        if not self._free:
            raise ValueError(f"one more block is needed, none of {self.count} is free")
        new = self._blocks_by_holder[holder][index] = self._free.pop()
        if other_holders == 1:
            del self._holders[old]
        else:
            self._holders[old] = other_holders
        return old, new


class PagedStep:
    """A step whose tokens lie where `batch` says."""

    def __init__(self, store: PagedStore, batch: PagedBatch) -> None:
        self._store = store
        self.batch = batch

    @property
    def attention(self) -> PagedStep:
        return self

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        return self._store.attention(query, key, value, self._store.pages(layer), self.batch, variant)


def paged_batch(tables: Tensor, rows: list[int], extents: list[Extent]) -> PagedBatch:
    """The tokens of `extents`, one after the other; `rows` are the sequences' rows of `tables`."""
    owners: list[int] = []
    positions: list[int] = []
    singles: list[int] = []
    chunks: list[tuple[int, int]] = []
    for row, extent in zip(rows, extents, strict=True):
        if extent.count == 1:
            singles.append(len(owners))
        else:
            chunks.append((len(owners), extent.count))
        owners.extend([row] * extent.count)
        positions.extend(range(extent.offset, extent.end))
    # One copy to the device instead of three, of the types that captured steps have: another type is another kernel,
    # which would be compiled while requests wait.
    packed = torch.tensor(owners + positions + singles, dtype=torch.int64).to(tables.device, non_blocking=True)
    tokens = len(owners)
    return PagedBatch(
        tables=tables,
        owners=packed[:tokens],
        positions=packed[tokens : 2 * tokens],
        singles=packed[2 * tokens :],
        chunks=tuple(chunks),
    )


BLOCK_TOKENS = 32
"""Positions of a block: half of the keys that a kernel reads at once, and what a sequence may waste at its end."""

FIRST_ROWS = 512
"""Rows of the block tables. They double when more sequences are there, which makes graphs that read them void."""


def tokens_that_fit(free_bytes: int, layout: CacheLayout, block_tokens: int = BLOCK_TOKENS) -> int:
    """The number of cached tokens to promise for so much free memory, in whole blocks."""
    return max(0, free_bytes) // (block_tokens * layout.bytes_per_token) * block_tokens


class PagedStore(Stateless):
    """Cached keys and values on one device, bounded by `capacity_tokens`, a whole number of blocks. `max_context` is
    the most positions of a sequence. Raises ValueError if not one block fits."""

    supports_prefix_sharing = True

    def __init__(
        self,
        layout: CacheLayout,
        capacity_tokens: int,
        max_context: int,
        attention: PagedAttention,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        count = capacity_tokens // block_tokens
        if count < 1:
            raise ValueError(f"{capacity_tokens} tokens of KV memory are less than one block of {block_tokens}")
        self.layout = layout
        self.block_tokens = block_tokens
        self.attention = attention
        self.cost = KVCost(block_tokens)
        self.capacity_tokens = count * block_tokens
        self.max_context = max_context
        self._blocks = Blocks(count)
        self._memories = [
            torch.empty(
                (len(group.layers), 2, count, group.kv_heads, block_tokens, group.head_dim),
                dtype=torch_type(layout.dtype),
                device=layout.device,
            )
            for group in layout.groups
        ]
        width = min(count, -(-max_context // block_tokens))
        width = -(-width // 16) * 16  # an aligned row of the tables is read in wide loads
        self.tables = torch.zeros(FIRST_ROWS, width, dtype=torch.int32, device=layout.device)
        self._rows: dict[int, int] = {}
        """Sequence → its row of the tables."""
        self._free_rows = list(range(FIRST_ROWS - 1, -1, -1))
        self._lengths: dict[int, int] = {}
        self._begun: list[Extent] = []
        """The extents of the step that is not committed."""

    @property
    def used_tokens(self) -> int:
        return sum(self.rounded(length) for length in self._lengths.values())

    @property
    def free_blocks(self) -> int:
        return self._blocks.free

    def rounded(self, tokens: int) -> int:
        return self.cost.rounded(tokens)

    def length(self, sid: int) -> int | None:
        return self._lengths.get(sid)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each (blocks, kv heads, block tokens, dim)."""
        group, place = self.layout.places[layer]
        memory = self._memories[group][place]
        return memory[0], memory[1]

    def begin(self, extents: list[Extent], beside: Iterable[Extent] = ()) -> PagedStep:
        """`beside` are those of a step that is under way and will be committed with this one."""
        rows = self.reserve(extents, beside)
        return PagedStep(self, paged_batch(self.tables, rows, extents))

    def reserve(self, extents: list[Extent], beside: Iterable[Extent] = ()) -> list[int]:
        """Blocks for the new tokens of a step; each sequence's row of the tables. Raises ValueError beyond capacity."""
        longest = max((extent.end for extent in extents), default=0)
        if longest > self.max_context:
            raise ValueError(f"a sequence would have {longest} positions, the model has {self.max_context}")
        self.settle([*extents, *beside])
        self._begun = [*extents, *beside]
        new_entries = [
            (self._row(extent.sid), index, block)
            for extent in extents
            for index, block in self._blocks.grow(extent.sid, -(-extent.end // self.block_tokens))
        ]
        self._write_tables(new_entries)
        return [self._rows[extent.sid] for extent in extents]

    def commit(self, extents: list[Extent]) -> None:
        self.settle(extents)
        self._begun = []
        for extent in extents:
            self._lengths[extent.sid] = extent.end

    def fork(self, sid: int, donor: int, count: int, *, take_over: bool, snapshots: bool = False) -> None:
        """Let `sid` begin with the first `count` positions of `donor`: it holds the same blocks, and a copy of the one
        that it goes on writing. `take_over` gives it the donor's own instead, and the donor is unknown from then on."""
        blocks = self._blocks
        block_count = -(-count // self.block_tokens)
        whole = count // self.block_tokens
        if take_over:
            self._rows[sid] = self._rows.pop(donor)
            del self._lengths[donor]
            blocks.rename(donor, sid)
            blocks.shrink(sid, block_count)
        else:
            blocks.share(donor, sid, block_count)
        if block_count > whole and (copied := blocks.separate(sid, whole)) is not None:
            old, new = copied
            for memory in self._memories:
                memory[:, :, new] = memory[:, :, old]
        row = self._row(sid)
        self._write_tables([(row, index, block) for index, block in enumerate(blocks.of(sid))])
        self._lengths[sid] = count

    def drop(self, sid: int) -> None:
        self._lengths.pop(sid, None)
        self._blocks.shrink(sid, 0)
        if (row := self._rows.pop(sid, None)) is not None:
            self._free_rows.append(row)

    def clear(self) -> None:
        for sid in list(self._rows):
            self.drop(sid)
        self._begun = []

    def settle(self, extents: list[Extent]) -> None:
        """Of the step that is not committed only `extents` will be: others give back the blocks they got for it."""
        coming = {extent.sid for extent in extents}
        for extent in self._begun:
            if extent.sid in self._rows and extent.sid not in coming:
                length = self._lengths.get(extent.sid)
                if length is None:
                    self.drop(extent.sid)
                else:
                    self._blocks.shrink(extent.sid, -(-length // self.block_tokens))
        self._begun = [extent for extent in self._begun if extent.sid in coming]

    def _row(self, sid: int) -> int:
        if sid not in self._rows:
            if not self._free_rows:
                rows = self.tables.shape[0]
                self.tables = torch.cat([self.tables, torch.zeros_like(self.tables)])
                self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
            self._rows[sid] = self._free_rows.pop()
        return self._rows[sid]

    def _write_tables(self, new_entries: list[tuple[int, int, int]]) -> None:
        """Enter (row, index, block) into the tables: most decode steps add none, then nothing is sent to the device."""
        if new_entries:
            entries = torch.tensor(new_entries, dtype=torch.int32).to(self.layout.device, non_blocking=True)
            self.tables[entries[:, 0].long(), entries[:, 1].long()] = entries[:, 2]
