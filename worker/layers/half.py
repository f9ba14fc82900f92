"""Weights in 16 bits, products in float32: half the bytes to read per token, at next to no loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_product = torch.ops.quantized.linear_dynamic_fp16.default


class HalfLinear(nn.Module):
    """y = x · Wᵀ + b with W in float16. x (…, inputs) → y (…, outputs), both float32, row by row. fbgemm widens the
    weights as it multiplies. Weights beyond 65,504 saturate."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)
        self.packed_bytes = 2 * weight.numel()

    def forward(self, inputs: Tensor) -> Tensor:
        return _product(inputs, self._packed)
