"""Attention of several tokens of each sequence over its pages: causal, any number of sequences in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from worker.kv.base import Variant
from worker.kv.torch.kernels.softmax import normalised, over_range
from worker.kv.torch.kernels.tiles import PLACES, SMALLEST, arguments
from worker.kv.torch.pages import PagedBatch

ROWS = 64
"""Rows of a tile: the query heads that share a key-value head, for as many tokens as there is room for."""


# fmt: off
@triton.jit(do_not_specialize_on_alignment=PLACES)
def _prefill(query, out, key_pages, value_pages, tables, owners, positions, tiles, sinks,
             query_head, query_token, table_row, scale, cap, window,
             CAPPED: tl.constexpr, SINKS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
             PADDED_GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, PAGE: tl.constexpr,
             TILE: tl.constexpr, KEYS: tl.constexpr, WIDENED: tl.constexpr, LOG2_E: tl.constexpr):
    """One piece of a chunk (axis 0) for one key-value head (axis 1)."""
    kv_head = tl.program_id(1)
    first = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    count = tl.load(tiles + 2 * tl.program_id(0) + 1)
    offset = tl.load(positions + first).to(tl.int32)
    row, place = tl.arange(0, TILE), tl.arange(0, PADDED_DIM)
    token, head = row // PADDED_GROUP, kv_head * GROUP + row % PADDED_GROUP
    real = (token < count) & (row % PADDED_GROUP < GROUP)
    mask = real[:, None] & (place < DIM)[None, :]
    queries = tl.load(query + head[:, None] * query_head + (first + token)[:, None] * query_token + place[None, :],
                    mask=mask, other=0.0)
    table = tables + tl.load(owners + first) * table_row
    best, total, sums = over_range(
        queries, offset + token, tl.maximum(offset - window + 1, 0), offset + count, table, kv_head, key_pages,
        value_pages, scale, cap, window, CAPPED, KV_HEADS, DIM, PADDED_DIM, TILE, PAGE, KEYS, WIDENED, LOG2_E)
    result = normalised(best, total, sums, sinks, head, real, SINKS, LOG2_E)
    target = ((first + token) * (KV_HEADS * GROUP) + head) * DIM
    tl.store(out + target[:, None] + place[None, :], result, mask=mask)
# fmt: on


def tile_rows(dim: int, padded_group: int) -> int:
    """Rows of a tile for heads of `dim`: at least one token's, and as many as registers hold."""
    return max(ROWS if dim <= 128 else ROWS // 2, padded_group, SMALLEST)


def prefill(query: Tensor, out: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch, variant: Variant) -> None:
    """query (heads, T, dim), dense along dim → rows of `out` (T, heads, dim) for the tokens of `batch.chunks`."""
    heads, _, dim = query.shape
    kv_heads = pages[0].shape[1]
    padded_group = triton.next_power_of_2(heads // kv_heads)
    tile = tile_rows(dim, padded_group)
    tiles = batch.tiles(tile // padded_group)
    _prefill[(tiles.shape[0], kv_heads)](
        out=out, tiles=tiles, PADDED_GROUP=padded_group, TILE=tile, **arguments(query, pages, batch, variant)
    )
