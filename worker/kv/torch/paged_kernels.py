"""Attention over pages by Triton kernels: new keys and values stored, single tokens and chunks attended.

It is only imported for a GPU or Triton's interpreter. Launchers take tensors and read no value from the device, so that
a CUDA graph can hold what they launch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from worker.kv.base import Variant
from worker.kv.torch.pages import PagedBatch

# Sizes that attention kernels are compiled for, and the arguments that all of them take.


LOG2_E = 1.4426950408889634
"""Kernels compute powers of two: exp(x) = 2 ** (x · log2 e)."""

SMALLEST = 16
"""Rows and columns of the smallest matrix product that tensor cores have."""

NO_WINDOW = 2**30

PLACES = ("owners", "positions", "singles")
"""Arguments that are parts of one tensor and begin anywhere in it. A kernel that relied on where they begin would be
compiled anew in the middle of serving."""


def padded(size: int) -> int:
    """The power of two that holds `size`, large enough for a matrix product."""
    return max(SMALLEST, triton.next_power_of_2(size))


def keys_at_once(dim: int, dtype: torch.dtype) -> int:
    """Keys that a program holds in shared memory at once, so that two stages of keys and values fit on any GPU."""
    bytes_per_key = padded(dim) * dtype.itemsize
    return 64 if bytes_per_key <= 256 else 32 if bytes_per_key <= 512 else 16


def widened(tensor: Tensor) -> bool:
    """True if products need float32 copies, because Triton's interpreter multiplies bfloat16 as integers. Tensor cores
    give the same result: they sum exact products in float32."""
    return tensor.device.type == "cpu" and tensor.dtype == torch.bfloat16


def arguments(query: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch, variant: Variant) -> dict[str, Any]:
    """By name, what prefill and decode alike are launched with."""
    heads, _, dim = query.shape
    _, kv_heads, block_tokens, _ = pages[0].shape
    return {
        "query": query,
        "key_pages": pages[0],
        "value_pages": pages[1],
        "tables": batch.tables,
        "owners": batch.owners,
        "positions": batch.positions,
        "sinks": query if variant.sinks is None else variant.sinks,
        "query_head": query.stride(0),
        "query_token": query.stride(1),
        "table_row": batch.tables.stride(0),
        "scale": variant.scaling,
        "cap": variant.softcap or 1.0,
        "window": variant.window or NO_WINDOW,
        "CAPPED": variant.softcap is not None,
        "SINKS": variant.sinks is not None,
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "DIM": dim,
        "PADDED_DIM": padded(dim),
        "PAGE": block_tokens,
        "KEYS": keys_at_once(dim, query.dtype),
        "WIDENED": widened(query),
        "LOG2_E": LOG2_E,
    }


# The part that prefill and decode share: queries over a range of a sequence's pages, in one running softmax.
#
# `best` (rows) is the highest score so far in units of log2, `total` (rows) the sum of the weights 2 ** (score - best),
# `sums` (rows, dim) the values in these weights (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018).


@triton.jit
def product(left, right, WIDENED: tl.constexpr):
    """Matrix product summed in float32; float32 factors are not rounded to fewer bits."""
    if WIDENED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def capped(scores, cap):
    """cap · tanh(scores / cap); tanh by way of the exponential, as tanh(x) = 2 · sigmoid(2 x) - 1."""
    return cap * (2.0 / (1.0 + tl.exp(tl.minimum(-2.0 * scores / cap, 80.0))) - 1.0)


# fmt: off
@triton.jit
def over_range(queries, sees, begin, end, table, kv_head, key_pages, value_pages, scale, cap, window,
               CAPPED: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
               TILE: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, WIDENED: tl.constexpr,
               LOG2_E: tl.constexpr):
    """`queries` (rows, dim), of which each sees the `window` positions up to `sees` (rows), over positions
    [begin, end) of the sequence with this table → (best, total, sums)."""
    place = tl.arange(0, PADDED_DIM)
    best = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    sums = tl.zeros([TILE, PADDED_DIM], tl.float32)
    for start in range(begin, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        inside = keys < end
        # Blocks are looked up in 64 bits: a layer of a large cache has more than 2 ** 31 numbers.
        block = tl.load(table + keys // PAGE, mask=inside, other=0).to(tl.int64)
        line = ((block * KV_HEADS + kv_head) * PAGE + keys % PAGE) * DIM
        # Memory behind the end is uninitialised, so it is not read.
        key = tl.load(key_pages + line[None, :] + place[:, None],
                      mask=inside[None, :] & (place < DIM)[:, None], other=0.0)
        scores = product(queries, key, WIDENED) * scale
        if CAPPED:
            scores = capped(scores, cap)
        visible = inside[None, :] & (keys[None, :] <= sees[:, None]) & (keys[None, :] > sees[:, None] - window)
        scores = tl.where(visible, scores * LOG2_E, float("-inf"))
        value = tl.load(value_pages + line[:, None] + place[None, :],
                        mask=inside[:, None] & (place < DIM)[None, :], other=0.0)
        higher = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet stays at -inf, and the difference of two infinities is not a number.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights, fade = tl.exp2(scores - shift[:, None]), tl.exp2(best - shift)
        total = total * fade + tl.sum(weights, 1)
        sums = sums * fade[:, None] + product(weights.to(value.dtype), value, WIDENED)
        best = higher
    return best, total, sums


@triton.jit
def normalised(best, total, sums, sinks, head, real, SINKS: tl.constexpr, LOG2_E: tl.constexpr):
    """The attention's result (rows, dim); 0 for rows that saw nothing. The learned score of a head, in `sinks`, takes
    weight but has no value."""
    shift = best
    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2_E
        shift = tl.maximum(best, sink)
        fade = tl.exp2(best - shift)
        total = total * fade + tl.exp2(sink - shift)
        sums = sums * fade[:, None]
    return sums / tl.where(total > 0, total, 1.0)[:, None]


# Writes the new keys and values of a step into their pages.


# fmt: off
@triton.jit(do_not_specialize_on_alignment=PLACES)
def _store(key, value, key_pages, value_pages, tables, owners, positions,
           key_head, key_token, value_head, value_token, table_row,
           HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr,
           PADDED_HEADS: tl.constexpr, PADDED_DIM: tl.constexpr):
    """One token, all of its heads. A token without an owner is stored nowhere."""
    token = tl.program_id(0)
    owner = tl.load(owners + token)
    real = owner >= 0
    position = tl.load(positions + token).to(tl.int32)
    block = tl.load(tables + owner * table_row + position // PAGE, mask=real, other=0).to(tl.int64)
    head = tl.arange(0, PADDED_HEADS)[:, None]
    place = tl.arange(0, PADDED_DIM)[None, :]
    inside = (head < tl.where(real, HEADS, 0)) & (place < DIM)
    target = ((block * HEADS + head) * PAGE + position % PAGE) * DIM + place
    wide = token.to(tl.int64)
    new_key = tl.load(key + head * key_head + wide * key_token + place, mask=inside, other=0.0)
    tl.store(key_pages + target, new_key, mask=inside)
    new_value = tl.load(value + head * value_head + wide * value_token + place, mask=inside, other=0.0)
    tl.store(value_pages + target, new_value, mask=inside)
# fmt: on


def store(key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch) -> None:
    """key and value (kv heads, T, dim), dense along dim, into pages (blocks, kv heads, block tokens, dim)."""
    heads, tokens, dim = key.shape
    _store[(tokens,)](
        key,
        value,
        *pages,
        batch.tables,
        batch.owners,
        batch.positions,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        batch.tables.stride(0),
        HEADS=heads,
        DIM=dim,
        PAGE=pages[0].shape[2],
        PADDED_HEADS=triton.next_power_of_2(heads),
        PADDED_DIM=triton.next_power_of_2(dim),
    )


# Attention of one new token per sequence over its pages, split along the keys, then reduced.
#
# The number of parts depends on the number of rows alone, so a captured graph stays right as its sequences grow.
# (Flash-Decoding: Dao, Haziza, Massa, Sizov, 2023.)


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


# Attention of several tokens of each sequence over its pages: causal, any number of sequences in one launch.


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


# Attention over pages by Triton kernels: single tokens and chunks of one batch each in a launch of their own.


def attend(
    query: Tensor, key: Tensor, value: Tensor, pages: tuple[Tensor, Tensor], batch: PagedBatch, variant: Variant
) -> Tensor:
    """See `PagedAttention`. float32, bfloat16 or float16; sums are float32. Waits for nothing on the device."""
    heads, tokens, dim = query.shape
    query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
    store(key, value, pages, batch)
    out = query.new_empty(tokens, heads, dim)
    if batch.singles.shape[0]:
        decode(query, out, pages, batch, variant)
    if batch.chunks:
        prefill(query, out, pages, batch, variant)
    return out
