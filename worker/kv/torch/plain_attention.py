"""Attention in plain torch: over contiguous keys and values, over pages, and of whole sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from worker.kv.base import Extent, Variant, WholeLayout
from worker.kv.torch.pages import PagedBatch

# Attention over contiguous keys and values, on any device of torch.
#
# Masks are additive: 0 where a token attends, -inf elsewhere, broadcast over batch and heads. Keys are never copied for
# the query heads that share them (grouped-query attention).


def decode(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, variant: Variant) -> Tensor:
    """One new token for each of B sequences: query (B, heads, dim), key and value (B, kv heads, L, dim), bias
    (B, 1, 1, L) → (B, heads, dim). The query heads of one key-value head become the rows of one small matrix."""
    sequences, heads, dim = query.shape
    shared = key.shape[1]
    rows = query.reshape(sequences, shared, heads // shared, dim)
    if variant.plain:
        mask = None if bias is None else bias.expand(sequences, 1, heads // shared, key.shape[2])
        out = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=variant.scaling)
    else:
        sinks = None if variant.sinks is None else variant.sinks.view(1, shared, heads // shared, 1)
        out = _explicit(rows, key, value, bias, variant, sinks)
    return out.reshape(sequences, heads, dim)


def prefill(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, variant: Variant) -> Tensor:
    """A chunk of one sequence: query (heads, n, dim), key and value (kv heads, L, dim), bias (n, L) → (n, heads, dim).
    Without a bias the chunk is the sequence's first: n = L, and the mask is the lower triangle."""
    heads, length, dim = query.shape
    shared = key.shape[0]
    if variant.plain:
        out = functional.scaled_dot_product_attention(
            query.unsqueeze(0),
            key.unsqueeze(0),
            value.unsqueeze(0),
            attn_mask=bias,
            is_causal=bias is None,
            scale=variant.scaling,
            enable_gqa=shared != heads,
        )
        return out[0].transpose(0, 1)
    if bias is None:
        bias = causal_bias(0, length, 0, length, None, query)
    rows = query.reshape(shared, heads // shared, length, dim)
    sinks = None if variant.sinks is None else variant.sinks.view(shared, heads // shared, 1, 1)
    out = _explicit(rows, key.unsqueeze(1), value.unsqueeze(1), bias, variant, sinks)
    return out.reshape(heads, length, dim).transpose(0, 1)


def _explicit(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, variant: Variant, sinks: Tensor | None
) -> Tensor:
    """Softmax written out, for what the fused kernel lacks. Capping comes before masking: tanh(-inf) would unmask."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * variant.scaling
    if variant.softcap is not None:
        scores = torch.tanh(scores / variant.softcap) * variant.softcap
    if bias is not None:
        scores = scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(value.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(weights, value)


def causal_bias(
    offset: int,
    count: int,
    first: int,
    last: int,
    window: int | None,
    like: Tensor,
    ends: Tensor | None = None,
    chunked: bool = False,
) -> Tensor:
    """(count, last - first): may the token at `offset + i` see the key at position `first + j`? With `ends` (count,) it
    sees those before `ends[i]`, its own position or later ones included."""
    tokens = torch.arange(offset, offset + count, device=like.device).unsqueeze(1)
    keys = torch.arange(first, last, device=like.device).unsqueeze(0)
    visible = _visible(tokens, keys, window, chunked)
    if ends is not None:
        visible |= (keys > tokens) & (keys < ends.unsqueeze(1))
    return additive(visible, like)


def length_bias(
    positions: Tensor, first: int, last: int, window: int | None, like: Tensor, chunked: bool = False
) -> Tensor:
    """(B, 1, 1, last - first) for one new token per sequence, at `positions` (B,)."""
    keys = torch.arange(first, last, device=like.device).unsqueeze(0)
    return additive(_visible(positions.unsqueeze(1), keys, window, chunked), like)[:, None, None, :]


def additive(visible: Tensor, like: Tensor) -> Tensor:
    """0 where `visible`, -inf elsewhere, in the type of `like`."""
    return torch.zeros_like(visible, dtype=like.dtype).masked_fill_(~visible, float("-inf"))


def _visible(tokens: Tensor, keys: Tensor, window: int | None, chunked: bool) -> Tensor:
    visible = keys <= tokens
    if chunked and window is not None:
        return visible & (keys >= tokens // window * window)
    return visible if window is None else visible & (keys > tokens - window)


# Attention over pages in plain torch: each sequence's pages are gathered and attended densely, one after the other.
#
# The reference for the Triton kernels, used where they can't run: on a CPU, in float64, without Triton.


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
        bias = causal_bias(offset, count, start, offset + count, variant.window, query)
        out[first:stop] = prefill(query[:, first:stop], keys, values, bias, variant)
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


# torch's attention of sequences that are computed whole.


Bias = Callable[[int], Tensor]
"""(1, heads, n, n) for a sequence of n tokens."""


class WholeAttention:
    """One step: the attention of each row over itself."""

    def __init__(self, layout: WholeLayout, extents: list[Extent]) -> None:
        self._layout = layout
        self.extents = extents
        self._masks: dict[tuple[int, int], Tensor] = {}

    def part(self, rows: slice) -> tuple[slice, WholeAttention]:
        """The tokens of neighbouring rows in the batch, and a step of these rows alone, for a thread of its own."""
        before = sum(extent.count for extent in self.extents[: rows.start])
        extents = self.extents[rows]
        return slice(before, before + sum(extent.count for extent in extents)), WholeAttention(self._layout, extents)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, variant: Variant, bias: Bias | None = None
    ) -> Tensor:
        """query (heads, T, dim), key and value (kv heads, T, dim) → (T, heads, dim). A window w lets a position see
        those less than w away. `bias` is added to the scores of a sequence, by its length; not beside a window."""
        if variant.softcap is not None or variant.sinks is not None:
            raise NotImplementedError("attention of whole sequences has no soft caps and no sinks")
        heads, tokens, dim = query.shape
        out = query.new_empty(tokens, heads, dim)
        start = 0
        for extent in self.extents:
            rows = slice(start, start := start + extent.count)
            windowed = variant.window is not None and variant.window < extent.count
            mask = self._mask(extent.count, variant.window or 0) if windowed else bias and bias(extent.count)
            attended = scaled_dot_product_attention(
                query[:, rows].unsqueeze(0),
                key[:, rows].unsqueeze(0),
                value[:, rows].unsqueeze(0),
                attn_mask=mask,
                is_causal=self._layout.causal and not windowed,
                scale=variant.scaling,
                enable_gqa=key.shape[0] != heads,
            )
            out[rows] = attended[0].transpose(0, 1)
        return out

    def _mask(self, count: int, window: int) -> Tensor:
        """True where a position (row) sees another one (column)."""
        mask = self._masks.get((count, window))
        if mask is None:
            places = torch.arange(count, device=self._layout.device)
            behind = places[:, None] - places[None, :]
            mask = behind.abs() < window
            if self._layout.causal:
                mask &= behind >= 0
            self._masks[count, window] = mask
        return mask
