"""Weights of a linear layer in blocks, as a file stores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from worker.weights.formats import BlockFormat


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix (outputs, inputs) in blocks along the inputs. `data` is uint8 of shape (outputs, row bytes)."""

    format: BlockFormat
    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1] // self.format.bytes * self.format.weights

    def rows(self, start: int, stop: int) -> Blocks:
        """The outputs [start, stop), a view."""
        return Blocks(self.format, self.data[start:stop])

    def columns(self, start: int, stop: int) -> Blocks:
        """The inputs [start, stop), a view. Raises ValueError where a border is inside a block."""
        size = self.format.weights
        if start % size or stop % size:
            raise ValueError(f"inputs {start} to {stop} cut a block of {size} weights ({self.format.name})")
        first, last = (place // size * self.format.bytes for place in (start, stop))
        return Blocks(self.format, self.data[:, first:last])

    def padded(self, outputs: int) -> Blocks:
        """The matrix with blocks of zeros below, up to `outputs` rows: itself where it has as many."""
        if outputs == self.data.shape[0]:  # `pad` copies all the same
            return self
        return Blocks(self.format, torch.nn.functional.pad(self.data, (0, 0, 0, outputs - self.data.shape[0])))


Weights = Tensor | Blocks
"""A stored matrix (outputs, inputs)."""
