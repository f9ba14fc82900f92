"""The circumstances of a trial in a child process: device, shapes, and random numbers of the model's type."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.selftest.shapes import Shapes

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True)
class Request:
    device: torch.device
    shapes: Shapes
    tokens: int
    """Rows of a case, and positions of a context: more are needed to measure than to compare."""

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.shapes.dtype]

    def random(self, *shape: int) -> Tensor:
        """Equal numbers on every device and in every process, on the device in the model's type."""
        generator = torch.Generator().manual_seed(sum(shape))
        return self.sent(torch.randn(*shape, generator=generator))

    def sent(self, values: Tensor) -> Tensor:
        return values.to(device=self.device, dtype=self.dtype)


class NotAvailable(Exception):
    """A trial has nothing to try on this device; the message says why."""
