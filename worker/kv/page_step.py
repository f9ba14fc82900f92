"""One step over pages: the batch's places, shared by all layers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from worker.kv.base import Extent
from worker.kv.paging import PagedAttention, PagedBatch
from worker.kv.variant import Variant


class PagedMemory(Protocol):
    """The part of a store that a step uses."""

    attention: PagedAttention

    def pages(self, layer: int) -> tuple[Tensor, Tensor]: ...


class PagedStep:
    """A step whose tokens lie where `batch` says."""

    def __init__(self, memory: PagedMemory, batch: PagedBatch) -> None:
        self._memory, self.batch = memory, batch

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant) -> Tensor:
        return self._memory.attention(query, key, value, self._memory.pages(layer), self.batch, variant)


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
    # One copy to the device instead of three.
    packed = torch.tensor(owners + positions + singles, dtype=torch.int32).to(tables.device, non_blocking=True)
    tokens = len(owners)
    return PagedBatch(
        tables=tables,
        owners=packed[:tokens],
        positions=packed[tokens : 2 * tokens],
        singles=None if len(singles) == tokens else packed[2 * tokens :],
        chunks=tuple(chunks),
    )
