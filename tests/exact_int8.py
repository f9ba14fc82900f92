"""The product of weights and activations in 8 bits, computed exactly, as every processor can."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LEVELS = 127
TINY = torch.finfo(torch.float32).tiny
"""Divisor for a row of zeros."""


class ExactInt8Linear(nn.Module):
    """y ≈ x · Wᵀ + b with a scale for each output and each row of x, as `--quant int8` has it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias, self.packed_bytes = bias, weight.numel()
        self.scale = (weight.float().abs().amax(dim=1) / LEVELS).clamp(min=TINY)
        self.integers = (weight.float() / self.scale.unsqueeze(1)).round().double()

    def forward(self, inputs: Tensor) -> Tensor:
        largest = inputs.abs().amax(dim=-1, keepdim=True).clamp(min=TINY)
        levels = (inputs / largest * LEVELS).round().double()
        product = (levels @ self.integers.T).float() * (self.scale / LEVELS) * largest
        return product if self.bias is None else product + self.bias
