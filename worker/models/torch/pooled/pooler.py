"""From the hidden states of a batch to a vector or a score of each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from worker.models.served import Batch
from worker.repository.pooling.description import Activation, Pool
from worker.tensors import as_tensor

_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "identity": lambda values: values,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Projection:
    """A linear layer, and the function of its outputs."""

    weight: Tensor
    bias: Tensor | None
    activation: Activation

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, values: Tensor) -> Tensor:
        return _FUNCTIONS[self.activation](functional.linear(values, self.weight, self.bias))


@dataclass(frozen=True)
class Pooler:
    """sentence-transformers' modules after the transformer: pooling, projections, and a length of 1."""

    pool: Pool
    projections: Sequence[Projection] = ()
    normalize: bool = False

    def __call__(self, batch: Batch, hidden_at: Callable[[Batch], Any]) -> Tensor:
        """(sampled rows, dimensions) in float32, or float64 of a float64 model. `hidden_at` computes the hidden states
        of a batch's `sampled` places."""
        values = self._pooled(batch, hidden_at)
        kind = torch.float64 if values.dtype == torch.float64 else torch.float32
        for projection in self.projections:
            values = projection(values.to(projection.weight.dtype))
        values = values.to(kind)
        return functional.normalize(values, dim=-1) if self.normalize else values

    def _pooled(self, batch: Batch, hidden_at: Callable[[Batch], Any]) -> Tensor:
        if self.pool == "last":
            return _tensor(hidden_at(batch))
        counts = [len(row.tokens) for row in batch.rows]
        if self.pool == "cls":
            return _tensor(hidden_at(replace(batch, sampled=np.cumsum([0, *counts[:-1]]))))
        hidden = _tensor(hidden_at(replace(batch, sampled=np.arange(sum(counts)))))
        return torch.stack([part.mean(dim=0) for part in hidden.split(counts)])


def _tensor(values: Any) -> Tensor:
    """The hidden states of either forward."""
    return values if isinstance(values, Tensor) else as_tensor(values)
