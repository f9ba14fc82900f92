"""Gates of gemma3n are cleared below a border in every type of numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from worker.collective import Solo
from worker.collective.base import Link
from worker.models.torch.layers import sparse_gates


class Gated(nn.Module):
    activation_sparsity = 0.95
    _gaussian_topk = staticmethod(lambda inputs: inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (0.0, 4.0), (5.0, 1.0)])
def test_the_share_above_the_border_is_that_of_a_normal_row(dtype: torch.dtype, mean: float, deviation: float) -> None:
    """Sums of squares of 16,384 numbers are beyond float16's largest number."""
    rows = torch.randn(2, 16384, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * deviation + mean
    module = Gated()
    sparse_gates(module, Link(Solo()))
    left = module._gaussian_topk(rows.to(dtype))
    assert left.dtype == dtype
    assert 0.045 < (left > 0).double().mean() < 0.055
