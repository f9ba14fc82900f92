"""The limits of a device, as plain torch reaches them: memory by a copy, arithmetic by a matrix product."""

from __future__ import annotations

import msgspec
import torch

from worker.selftest.case import timed
from worker.selftest.request import DTYPES


class Limits(msgspec.Struct, frozen=True):
    gigabytes_per_s: float
    teraflops: float


def measured(device: torch.device, dtype: str) -> Limits:
    """By the best of three rounds of some 0.07 s each."""
    large = device.type == "cuda"
    source = torch.zeros(2**28 if large else 2**24, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copied = timed(lambda: target.copy_(source), device)
    width = 8192 if large else 1024
    left = torch.zeros(width, width, dtype=DTYPES[dtype], device=device)
    multiplied = timed(lambda: left @ left, device)
    return Limits(2 * source.nbytes / copied / 1e9, 2 * width**3 / multiplied / 1e12)
