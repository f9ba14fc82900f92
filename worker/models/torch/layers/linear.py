"""Packed weights (native/linear.py) as modules of torch, for encoders and models whose forward is not C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from worker.models.native.linear import PackedLinear
from worker.native.library import Threads
from worker.tensors import as_array, as_tensor
from worker.weights.stored_matrix import StoredMatrix


class NativeLinear(nn.Module):
    """y = x · Wᵀ + b in float32. x (…, inputs) → y (…, outputs); see PackedLinear."""

    def __init__(
        self, parts: Sequence[Any], bias: Tensor | None, kinds: Sequence[torch.dtype | str], threads: Threads
    ) -> None:
        """`parts` (outputs, inputs): tensors, or stored matrices. Raises ValueError as PackedLinear."""
        super().__init__()
        stored = [part if isinstance(part, StoredMatrix) else as_array(part) for part in parts]
        names = [str(kind).removeprefix("torch.") for kind in kinds]
        self.packed = PackedLinear(stored, None if bias is None else as_array(bias), names, threads)
        self.outputs = self.packed.outputs
        self.inputs = self.packed.inputs
        self.threads = threads

    @property
    def packed_bytes(self) -> int:
        """Of weights and bias."""
        return self.packed.bytes

    def forward(self, inputs: Tensor) -> Tensor:
        return as_tensor(self.packed.product(as_array(inputs)))

    def look_up(self, ids: Tensor) -> Tensor:
        """The weights of the outputs `ids` (…) as rows (…, inputs)."""
        return as_tensor(self.packed.look_up(as_array(ids)))


class PackedEmbedding(nn.Module):
    """ids (…) → rows (…, hidden) in float32, looked up in packed weights: those of the tied head, or its own."""

    def __init__(self, table: NativeLinear, embedding: nn.Module, own: bool = False) -> None:
        """Replaces `embedding`, whose scale some families have. `own`: the table is no part of another module."""
        super().__init__()
        self.weight = torch.empty(table.outputs, 0)  # only to say how many rows there are
        self.table = table if own else None
        self._look_up = table.look_up
        self._scale = getattr(embedding, "embed_scale", None)

    def forward(self, ids: Tensor) -> Tensor:
        rows = self._look_up(ids)
        return rows if self._scale is None else rows * self._scale
