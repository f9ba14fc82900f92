"""Rotary embeddings of sequences with images: a token has a position in time, one in height and one in width (mRoPE).

https://arxiv.org/abs/2409.12191; qwen3_vl interleaves the sections.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.models.served import AXES


def interleaved_axes(sections: list[int], frequencies: int) -> Tensor:
    """The axis, 0 to 2, by which each frequency turns: (frequencies,) int32."""
    axes = torch.zeros(frequencies, dtype=torch.int32)
    for axis in range(1, AXES):
        axes[axis : sections[axis] * AXES : AXES] = axis
    return axes


class SectionedRotary(nn.Module):
    """The rotary embedding of a model in torch. With `positions` (3, tokens) it takes these instead of the caller's."""

    def __init__(self, inner: Any, axes: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self._axes = axes.long()
        self.positions: Tensor | None = None

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (1, tokens, head dim)."""
        if self.positions is None:
            return self.inner(x, position_ids)
        angles = self.positions[self._axes].T.float() * self.inner.inv_freq.float()
        both = torch.cat((angles, angles), dim=-1).unsqueeze(0)
        scale = self.inner.attention_scaling
        return (both.cos() * scale).to(x.dtype), (both.sin() * scale).to(x.dtype)
