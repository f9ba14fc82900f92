"""Attention over contiguous keys and values, on any device of torch.

Masks are additive: 0 where a token attends, -inf elsewhere, broadcast over batch and heads. Keys are never copied for
the query heads that share them (grouped-query attention).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from worker.kv.base import Variant


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
    seen = keys <= tokens
    if chunked and window is not None:
        return seen & (keys >= tokens // window * window)
    return seen if window is None else seen & (keys > tokens - window)
