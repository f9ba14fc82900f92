"""Embedding tables apart from a packed head: their rows in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class HalfEmbedding(nn.Module):
    """ids (…) → rows (…, hidden) in float32, from a table in the checkpoint's own 16-bit type, or float16. Replaces
    transformers' embedding, also the scaled one of some families."""

    def __init__(self, embedding: nn.Embedding, rows: Tensor) -> None:
        super().__init__()
        own = rows.dtype if rows.dtype in (torch.float16, torch.bfloat16) else torch.float16
        self.weight = nn.Parameter(torch.empty(rows.shape, dtype=own).copy_(rows), requires_grad=False)
        self._scale: Tensor | None = getattr(embedding, "embed_scale", None)

    def forward(self, ids: Tensor) -> Tensor:
        rows = functional.embedding(ids, self.weight).float()
        return rows if self._scale is None else rows * self._scale
