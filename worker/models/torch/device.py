"""The GPU of a rank."""

from __future__ import annotations

import torch

from control.errors import DevicesError


def use_gpu(device: str) -> None:
    """Compute on the GPU `device` of the form cuda:N. Raises DevicesError where it is absent."""
    index = int(device.partition(":")[2] or 0)
    count = torch.cuda.device_count()
    if index >= count:
        raise DevicesError(
            f"device {device} was asked for, but torch sees {count} GPUs on this host; "
            "name other --devices, or allow the CPU with --devices cpu"
        )
    torch.cuda.set_device(index)
