"""Attention of one new token per sequence over its pages, split along the keys, then reduced.

The number of parts depends on the number of rows alone, so a captured graph stays right as its sequences grow.
(Flash-Decoding: Dao, Haziza, Massa, Sizov, 2023.)
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kv.base import Variant
from worker.kv.torch.kernels.softmax import normalised, over_range
from worker.kv.torch.kernels.tiles import PLACES, arguments, padded
from worker.kv.torch.pages import PagedBatch

MOST_SPLITS = 32


# fmt: off
@triton.jit(do_not_specialize_on_alignment=PLACES)
def _decode(query, out, partial, key_pages, value_pages, tables, owners, positions, singles, sinks,
            query_head, query_token, table_row, scale, cap, window,
            CAPPED: tl.constexpr, SINKS: tl.constexpr, KV_HEADS: tl.constexpr,
            GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
            PAGE: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WIDENED: tl.constexpr,
            LOG2_E: tl.constexpr):
    """One sequence (axis 0), one key-value head (axis 1), one part of the keys (axis 2). A line of `partial` has the
    values, then best and total, of one row, head and part."""
    number, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(singles + number)
    owner = tl.load(owners + token)
    # A row that fills up a bucket has no keys.
    length = tl.where(owner >= 0, tl.load(positions + token).to(tl.int32) + 1, 0)
    first = tl.maximum(length - window, 0)
    part = tl.cdiv(tl.cdiv(length - first, SPLITS), KEYS) * KEYS
    begin = first + split * part
    end = tl.minimum(begin + part, length)
    row, place = tl.arange(0, TILE), tl.arange(0, PADDED_DIM)
    head, real = kv_head * GROUP + row, row < GROUP
    mask = real[:, None] & (place < DIM)[None, :]
    queries = tl.load(query + head[:, None] * query_head + token * query_token + place[None, :], mask=mask, other=0.0)
    best, total, sums = over_range(
        queries, length - 1 + row * 0, begin, end, tables + owner * table_row, kv_head, key_pages, value_pages,
        scale, cap, window, CAPPED, KV_HEADS, DIM, PADDED_DIM, TILE, PAGE, KEYS, WIDENED, LOG2_E)
    if SPLITS == 1:
        result = normalised(best, total, sums, sinks, head, real, SINKS, LOG2_E)
        target = (token * (KV_HEADS * GROUP) + head) * DIM
        tl.store(out + target[:, None] + place[None, :], result, mask=mask)
    else:
        line = ((number.to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split) * (DIM + 2)
        tl.store(partial + line[:, None] + place[None, :], sums, mask=mask)
        tl.store(partial + line + DIM, best, mask=real)
        tl.store(partial + line + DIM + 1, total, mask=real)


@triton.jit(do_not_specialize_on_alignment=PLACES)
def _reduce(partial, out, singles, sinks, SINKS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
            PADDED_DIM: tl.constexpr, SPLITS: tl.constexpr, LOG2_E: tl.constexpr):
    """One sequence (axis 0) and one head (axis 1)."""
    number, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(singles + number)
    split, place = tl.arange(0, SPLITS), tl.arange(0, PADDED_DIM)
    line = ((number.to(tl.int64) * HEADS + head) * SPLITS + split) * (DIM + 2)
    best, total = tl.load(partial + line + DIM), tl.load(partial + line + DIM + 1)
    highest = tl.max(best, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(best - highest)
    whole = tl.sum(weights * total, 0)
    if SINKS:
        whole += tl.exp2(sink - highest)
    sums = tl.load(partial + line[:, None] + place[None, :], mask=(place < DIM)[None, :], other=0.0)
    value = tl.sum(sums * weights[:, None], 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(out + (token * HEADS + head) * DIM + place, value, mask=place < DIM)
# fmt: on


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def splits_for(rows: int, kv_heads: int, device: torch.device) -> int:
    """Splits that give each of the device's processors about two programs, a power of two."""
    splits = 2 * _processors(device) // max(1, rows * kv_heads)
    return min(MOST_SPLITS, triton.next_power_of_2(max(1, splits)))


def decode(
    query: Tensor,
    out: Tensor,
    pages: tuple[Tensor, Tensor],
    batch: PagedBatch,
    variant: Variant,
    splits: int | None = None,
) -> None:
    """query (heads, T, dim), dense along dim → rows of `out` (T, heads, dim) for the tokens of `batch.singles`."""
    heads, _, dim = query.shape
    kv_heads, rows = pages[0].shape[1], batch.singles.shape[0]
    splits = splits or splits_for(rows, kv_heads, query.device)
    shape = (rows, heads, splits, dim + 2) if splits > 1 else (1,)
    partial = torch.empty(shape, dtype=torch.float32, device=query.device)
    common = arguments(query, pages, batch, variant)
    _decode[(rows, kv_heads, splits)](
        out=out, partial=partial, singles=batch.singles, TILE=padded(heads // kv_heads), SPLITS=splits, **common
    )
    if splits > 1:
        shared = {name: common[name] for name in ("sinks", "SINKS", "DIM", "PADDED_DIM", "LOG2_E")}
        _reduce[(rows, heads)](partial, out, batch.singles, HEADS=heads, SPLITS=splits, **shared)
