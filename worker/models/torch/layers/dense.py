"""Weights as they are: any type, any device."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class DenseLinear(nn.Module):
    """y = x · Wᵀ + b. x (…, inputs) → y (…, outputs)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        # A parameter stays the same one: a tied head shares the embedding's.
        self.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return functional.linear(inputs, self.weight, self.bias)


def stacked(parts: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The parts (rows, …) one under the other, always as a copy. A tensor of safetensors may be the mapped file, which
    may change in place, and whose alignment would change the speed and the last bits of products."""
    rows = sum(part.shape[0] for part in parts)
    rows_of_all = torch.empty(rows, *parts[0].shape[1:], dtype=dtype, device=device)
    for place, part in zip(rows_of_all.split([part.shape[0] for part in parts]), parts, strict=True):
        place.copy_(part)
    return rows_of_all
