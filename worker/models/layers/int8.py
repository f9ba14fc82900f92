"""Weights and activations in 8 bits: a quarter of the bytes, and integer products.

A weight has one scale per output. An activation has one scale per row: with a scale for the whole batch, as in torch's
dynamic quantisation, an outlier of one user would blur the others' answers.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn

_product = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32.default

ACTIVATION_LEVELS, ZERO_POINT = 127, 128
"""A row in [-1, 1] becomes 1 … 255 around 128."""
ACTIVATION_SCALE = 1.0 / ACTIVATION_LEVELS
SMALLEST = torch.finfo(torch.float32).tiny
"""Divisor for a row of zeros."""


class Int8Linear(nn.Module):
    """y ≈ x · Wᵀ + b. x (…, inputs) → y (…, outputs), both float32. Sums are exact integers, so a row's bits don't
    depend on the batch. NaN or infinity in a row gives NaN or infinity in that row alone."""

    def __init__(self, weight: Tensor, bias: Tensor | None, levels: int | None = None) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._packed = pack(weight, levels or weight_levels())
        self.packed_bytes = weight.numel() + 4 * weight.shape[0]

    def forward(self, inputs: Tensor) -> Tensor:
        largest = torch.linalg.vector_norm(inputs, float("inf"), -1, keepdim=True).clamp_(min=SMALLEST)
        product = _product(inputs / largest, ACTIVATION_SCALE, ZERO_POINT, self._packed)
        bias = self.bias
        return product.mul_(largest) if bias is None else torch.addcmul(bias, product, largest)


def pack(weight: Tensor, levels: int, rows: int = 8192) -> torch.ScriptObject:
    """`weight` (outputs, inputs) of any float type as fbgemm's packed matrix, values in ± `levels`. Packs `rows`
    outputs at a time, to avoid a float copy of the whole."""
    integers = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].float()
        scale = (part.abs().amax(dim=1) / levels).clamp_(min=SMALLEST)
        scales[start : start + rows] = scale
        integers[start : start + rows] = (part / scale.unsqueeze(1)).round_()
    zeros = torch.zeros(weight.shape[0], dtype=torch.int64)
    make_quantized: Any = getattr(torch, "_make_per_channel_quantized_tensor")  # noqa: B009 (it has no public name)
    with warnings.catch_warnings():
        # torch means to drop quantized tensors one day; fbgemm's packed matrix is made from nothing else.
        warnings.filterwarnings("ignore", ".*quantized tensor creation functions", UserWarning)
        quantized = make_quantized(integers, scales.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(quantized, None)


@functools.cache
def weight_levels() -> int:
    """127 if the processor sums products in 32 bits; 63 if it adds two in 16 bits first, as without VNNI: 2 · 255 · 127
    would overflow. The kernel is measured, because it may ignore the processor's flags."""
    ones = torch.ones(1, 64)
    packed = pack(torch.ones(16, 64), 127)
    exact = bool((_product(ones, ACTIVATION_SCALE, ZERO_POINT, packed) - 64).abs().max() < 0.01)
    return 127 if exact else 63
