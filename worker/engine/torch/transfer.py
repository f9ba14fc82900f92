"""Transfers of small tensors from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def sent(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`values` on the device, [len(values)]; unlike a tensor that is made there, without waiting for what runs."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
