"""RMS norms as one call into torch instead of six."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-6


class FusedRMSNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over the last dimension, in float32. The weight may be None."""

    def __init__(self, weight: Tensor | None, eps: float) -> None:
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)


@torch.inference_mode()
def fuse_norms(model: nn.Module) -> None:
    """Replace every RMS norm of a float32 model that computes the same as torch's. Each norm is measured, because
    formulas differ by family (some add one to the weight)."""
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if (fused := _equal(child)) is not None:
                setattr(model.get_submodule(path), name, fused)


def _equal(norm: Any) -> FusedRMSNorm | None:
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if "RMSNorm" not in type(norm).__name__ or not isinstance(eps, float):
        return None
    weighted = isinstance(weight, Tensor)
    sample = torch.randn(4, *(weight.shape if weighted else (16,)), generator=torch.Generator().manual_seed(0))
    expected = norm(sample)
    for candidate in (weight.detach(), 1.0 + weight.detach()) if weighted else (None,):
        fused = FusedRMSNorm(candidate, eps)
        if torch.allclose(fused(sample), expected, rtol=TOLERANCE, atol=TOLERANCE):
            return fused
    return None
