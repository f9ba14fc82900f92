"""Attention over pages in plain torch: each sequence's pages are gathered and attended densely, one after the other.

The reference for the Triton kernels, used where they can't run: on a CPU, in float64, without Triton.
"""

from __future__ import annotations

from torch import Tensor

from worker.kv.base import Variant
from worker.kv.torch import dense
from worker.kv.torch.pages import PagedBatch


def attend(
    query: Tensor, key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch, variant: Variant
) -> Tensor:
    """See `PagedAttention`. Waits for the device, so no graph can hold it."""
    owners = batch.owners.tolist()
    positions = batch.positions.tolist()
    _store(key, value, pages, batch)
    heads, tokens, dim = query.shape
    out = query.new_zeros(tokens, heads, dim)
    singles = [(token, 1) for token in batch.singles.tolist() if owners[token] >= 0]
    for first, count in [*singles, *batch.chunks]:
        offset = positions[first]
        stop = first + count
        start = 0 if variant.window is None else max(0, offset + 1 - variant.window)
        keys, values = (_gather(memory, batch.tables[owners[first]], start, offset + count) for memory in pages)
        bias = dense.causal_bias(offset, count, start, offset + count, variant.window, query)
        out[first:stop] = dense.prefill(query[:, first:stop], keys, values, bias, variant)
    return out


def _store(key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch) -> None:
    block_tokens = pages[0].shape[2]
    real = (batch.owners >= 0).nonzero()[:, 0]
    positions = batch.positions[real].long()
    blocks = batch.tables[batch.owners[real].long(), positions // block_tokens].long()
    for memory, new in ((pages[0], key), (pages[1], value)):
        memory[blocks, :, positions % block_tokens] = new[:, real].transpose(0, 1)


def _gather(memory: Tensor, table: Tensor, start: int, stop: int) -> Tensor:
    """Positions [start, stop) of one sequence, (kv heads, stop - start, dim)."""
    block_tokens = memory.shape[2]
    first = start // block_tokens
    blocks = memory[table[first : -(-stop // block_tokens)].long()]
    whole = blocks.transpose(0, 1).flatten(1, 2)
    return whole[:, start - first * block_tokens : stop - first * block_tokens]
