"""Linear layers whose weights stay codes with a scale by group of inputs, computed by torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.weights.schemes import INT8
from worker.weights.stored_matrix import StoredMatrix

ROWS = 1024
"""Outputs whose weights are floats at one time."""

SMALLEST = torch.finfo(torch.float32).tiny
"""Divisor for a row of zeros."""


class GroupedLinear(nn.Module):
    """y = x · Wᵀ + b with W made of stored and plain matrices. x (…, inputs) → y (…, outputs), of
    one type. Weights become floats a thousand outputs at a time, for each product."""

    def __init__(self, parts: list[Tensor | StoredMatrix], bias: Tensor | None, dtype: torch.dtype) -> None:
        """`parts` (outputs, inputs) lie one below the other."""
        super().__init__()
        # Codes may be the mapped file, which may change in place.
        self._parts = [
            part.to(dtype) if isinstance(part, Tensor) else replace(part, codes=part.codes.clone()) for part in parts
        ]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.packed_bytes = sum(part.nbytes for part in self._parts)

    def forward(self, inputs: Tensor) -> Tensor:
        product = torch.cat([_product(inputs, part) for part in self._parts], dim=-1)
        return product if self.bias is None else product + self.bias


def _product(inputs: Tensor, part: Tensor | StoredMatrix) -> Tensor:
    if isinstance(part, Tensor):
        return functional.linear(inputs, part)
    starts = range(0, part.shape[0], ROWS)
    if part.kind != INT8:
        return torch.cat(
            [functional.linear(inputs, part.rows(at, at + ROWS).dequantized(inputs.dtype)) for at in starts], dim=-1
        )
    levels, largest = rounded(inputs)
    # Sums of whole numbers, exact in float64.
    sums = torch.cat([functional.linear(levels, part.rows(at, at + ROWS).values().double()) for at in starts], dim=-1)
    assert part.scales is not None
    return (sums.to(inputs.dtype) * part.scales[:, 0].to(inputs.dtype)) * (largest / 127)


def rounded(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Each row (…, inputs) in whole numbers of ± 127, as float64, and the largest of its magnitudes (…, 1): a number is
    worth largest / 127. NaN stays NaN in its row."""
    largest = inputs.abs().amax(dim=-1, keepdim=True).clamp(min=SMALLEST)
    return torch.round(inputs / largest * 127).double(), largest
