"""Weights in 16 bits, products in float32: half the bytes to read per token, at next to no loss."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

_product = torch.ops.quantized.linear_dynamic_fp16.default


class HalfLinear(nn.Module):
    """y = x · Wᵀ + b with W in float16. x (…, inputs) → y (…, outputs), both float32; the bits of a row don't depend on
    the others. fbgemm widens the weights as it multiplies. Weights beyond 65,504 saturate."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        self.packed_bytes = 2 * weight.numel()

    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        count = rows.shape[0]
        if missing := -count % rows_together():
            rows = functional.pad(rows, (0, 0, 0, missing))
        product = _product(rows, self._packed)[:count]
        return product.view(*inputs.shape[:-1], product.shape[-1])


@functools.cache
def rows_together() -> int:
    """Of how many rows fbgemm's batches must be a multiple. With AVX2 its kernels for one row and for two add in an
    order of their own, and a batch of 7, 14 or 121 rows ends in one of them; multiples of 3 don't. Where all kernels
    add in the same order: 1. The kernels are measured, because fbgemm may ignore the processor's flags."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.ops.quantized.linear_prepack_fp16(torch.randn(64, 256, generator=generator), None)
    rows = torch.randn(1, 256, generator=generator).repeat(3, 1)
    three = _product(rows, packed)
    return 1 if all(torch.equal(_product(rows[:count], packed), three[:count]) for count in (1, 2)) else 3
