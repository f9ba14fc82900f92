"""The part that prefill and decode share: queries over a range of a sequence's pages, in one running softmax.

`best` (rows) is the highest score so far in units of log2, `total` (rows) the sum of the weights 2 ** (score - best),
`sums` (rows, dim) the values in these weights (Milakov, Gimelshein: Online normalizer calculation for softmax, 2018).
"""

from __future__ import annotations

import triton
import triton.language as tl


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
