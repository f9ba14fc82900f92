"""Rotary position embedding of query and key, in place (Su and others: RoFormer, 2021)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


# fmt: off
@triton.jit
def _turn(heads, token, head_stride, token_stride, cos_low, cos_high, sin_low, sin_high,
          HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    """All heads of one token: the pair (low, high) is one number of each half."""
    head = tl.arange(0, PADDED_HEADS)[:, None]
    place = tl.arange(0, PADDED_HALF)[None, :]
    mask = (head < HEADS) & (place < HALF)
    start = heads + token * token_stride + head * head_stride + place
    low = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(start + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.store(start, low * cos_low - high * sin_low, mask=mask)
    tl.store(start + HALF, high * cos_high + low * sin_high, mask=mask)


@triton.jit
def _rotary(query, key, cos, sin, query_head, query_token, key_head, key_token, cos_token, sin_token,
            HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
            PADDED_KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr):
    """One token."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED_HALF)[None, :]
    mask = place < HALF
    cos_low = tl.load(cos + token * cos_token + place, mask=mask, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + token * cos_token + HALF + place, mask=mask, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + token * sin_token + place, mask=mask, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + token * sin_token + HALF + place, mask=mask, other=0.0).to(tl.float32)
    _turn(query, token, query_head, query_token, cos_low, cos_high, sin_low, sin_high,
          HEADS, PADDED_HEADS, HALF, PADDED_HALF)
    _turn(key, token, key_head, key_token, cos_low, cos_high, sin_low, sin_high,
          KV_HEADS, PADDED_KV_HEADS, HALF, PADDED_HALF)
# fmt: on


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """query (heads, T, dim) and key (kv heads, T, dim), dense along dim, by the angles of cos and sin (T, dim)."""
    heads, tokens, dim = query.shape
    _rotary[(tokens,)](
        query,
        key,
        cos,
        sin,
        *query.stride()[:2],
        *key.stride()[:2],
        cos.stride(0),
        sin.stride(0),
        HEADS=heads,
        PADDED_HEADS=triton.next_power_of_2(heads),
        KV_HEADS=key.shape[0],
        PADDED_KV_HEADS=triton.next_power_of_2(key.shape[0]),
        HALF=dim // 2,
        PADDED_HALF=triton.next_power_of_2(dim // 2),
    )
