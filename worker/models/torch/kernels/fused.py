"""Fused Triton kernels: root mean square norm, the gate of a feed-forward layer, rotary position embedding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Root mean square norm in one pass over its rows (Zhang, Sennrich: Root Mean Square Layer Normalization, 2019).


# fmt: off
@triton.jit
def _rms_norm(rows, weight, out, outer_stride, inner_stride, inner, eps,
              DIM: tl.constexpr, PADDED_DIM: tl.constexpr, ONE_ADDED: tl.constexpr):
    """One row; rows are numbered by (outer, inner)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED_DIM)
    mask = place < DIM
    start = row // inner * outer_stride + row % inner * inner_stride
    values = tl.load(rows + start + place, mask=mask, other=0.0)
    value = values.to(tl.float32)
    value = value / tl.sqrt(tl.sum(value * value, 0) / DIM + eps)
    factor = tl.load(weight + place, mask=mask, other=0.0)
    # Rounded where the modelling code rounds: gemma's after the weight, which is kept as its difference to one.
    if ONE_ADDED:
        result = value * (1.0 + factor.to(tl.float32))
    else:
        result = value.to(values.dtype).to(tl.float32) * factor.to(tl.float32)
    tl.store(out + row * DIM + place, result, mask=mask)
# fmt: on


def rms_norm(inputs: Tensor, weight: Tensor, eps: float, *, one_added: bool) -> Tensor:
    """inputs (…, dim) → the same shape, dense: inputs / √(mean of squares + eps) · weight, or · (1 + weight). A view of
    shape (1, tokens, heads, dim) into a wider tensor is read without a copy."""
    dim = inputs.shape[-1]
    if inputs.dim() == 4 and inputs.shape[0] == 1 and inputs.stride(-1) == 1:
        inner = inputs.shape[2]
        outer_stride = inputs.stride(1)
        inner_stride = inputs.stride(2)
    else:
        inputs = inputs.contiguous()
        inner = 1
        outer_stride = dim
        inner_stride = dim
    out = torch.empty(inputs.shape, dtype=inputs.dtype, device=inputs.device)
    if out.numel():
        padded = triton.next_power_of_2(dim)
        _rms_norm[(out.numel() // dim,)](
            inputs,
            weight,
            out,
            outer_stride,
            inner_stride,
            inner,
            eps,
            DIM=dim,
            PADDED_DIM=padded,
            ONE_ADDED=one_added,
            num_warps=min(16, max(1, padded // 256)),
        )
    return out


# The gate of a feed-forward layer: activation(gate) · up in one pass.


BLOCK = 1024

SILU = "silu"
GELU_TANH = "gelu_tanh"


# fmt: off
@triton.jit
def _gated(gate, up, out, gate_row, up_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """A part (axis 1) of one row (axis 0)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < WIDTH
    values = tl.load(gate + row * gate_row + place, mask=mask, other=0.0)
    value = values.to(tl.float32)
    # x · sigmoid(x), or GELU by way of tanh, as x · (1 + tanh(y)) / 2 = x · sigmoid(2 y).
    slope = value
    if GELU:
        slope = 2.0 * 0.7978845608028654 * (value + 0.044715 * value * value * value)
    active = (value / (1.0 + tl.exp(tl.minimum(-slope, 80.0)))).to(values.dtype).to(tl.float32)
    factor = tl.load(up + row * up_row + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + place, active * factor, mask=mask)
# fmt: on


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """gate and up (…, width), dense along width → `activation`(gate) · up, dense; SILU or GELU_TANH."""
    width = gate.shape[-1]
    rows_of_gate, rows_of_up = (
        values.flatten(0, -2) if values.stride(-1) == 1 else values.reshape(-1, width) for values in (gate, up)
    )
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        _gated[(rows_of_gate.shape[0], triton.cdiv(width, BLOCK))](
            rows_of_gate,
            rows_of_up,
            out,
            rows_of_gate.stride(0),
            rows_of_up.stride(0),
            WIDTH=width,
            BLOCK=BLOCK,
            GELU=activation == GELU_TANH,
        )
    return out


# Rotary position embedding of query and key, in place (Su and others: RoFormer, 2021).


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
