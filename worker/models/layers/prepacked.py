"""Float32 weights in the order in which oneDNN reads them fastest."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_product = torch.ops.mkldnn._linear_pointwise.default


class PrepackedLinear(nn.Module):
    """y = x · Wᵀ + b in float32. x (…, inputs) → y (…, outputs)."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        # Laid out for one row: of the layouts it is the only one that no other kernel beats there, and it is also ahead
        # of the plain product for more rows.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), 1)
        self.packed_bytes = 4 * weight.numel()

    def forward(self, inputs: Tensor) -> Tensor:
        return _product(inputs, self._packed, self.bias, "none", [], "")
