"""Root mean square norm in one pass over its rows (Zhang, Sennrich: Root Mean Square Layer Normalization, 2019)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
