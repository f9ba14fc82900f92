"""Short convolutions between two gates, the recurrent layers of lfm2, computed by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.kv.torch.slab_attention import SlabAttention, StateTensors


class GatedConvolution(nn.Module):
    """C · convolution(B · x) of this rank's channels, over a flat batch. `layer` counts the recurrent layers."""

    def __init__(self, loaded: Any, layer: int) -> None:
        """`loaded` is the module of transformers, or one with its names, that holds this rank's weights."""
        super().__init__()
        self.projections = loaded
        self.layer = layer
        self.filter = nn.Parameter(loaded.conv.weight[:, 0].t().contiguous(), requires_grad=False)
        """(taps, channels), the newest input last."""
        self.bias: Tensor | None = getattr(loaded.conv, "bias", None)
        del loaded.conv

    def forward(self, hidden_states: Tensor, *, cache_step: SlabAttention, **_: Any) -> Tensor:
        """hidden_states (1, T, hidden) → (1, T, hidden); advances the states of the step's sequences."""
        before, after, values = self.projections.in_proj(hidden_states[0]).chunk(3, -1)
        wider = torch.float64 if hidden_states.dtype == torch.float64 else torch.float32
        inputs = (before * values).to(wider)
        out = torch.empty_like(after)
        first = 0
        for extent, state in zip(cache_step.extents, cache_step.states, strict=True):
            rows = slice(first, first + extent.count)
            out[rows] = after[rows] * self._convolved(state, inputs[rows]).to(after.dtype)
            first += extent.count
        return self.projections.out_proj(out).unsqueeze(0)

    def _convolved(self, state: StateTensors, inputs: Tensor) -> Tensor:
        """One sequence's new inputs (T, channels) through the convolution; its window moves on."""
        window = state.window(self.layer)
        whole = torch.cat([window, inputs])
        taps = self.filter.to(inputs.dtype)
        mixed = torch.einsum("tci,ic->tc", whole.unfold(0, len(taps), 1), taps)
        window.copy_(whole[len(inputs) :])
        return mixed if self.bias is None else mixed + self.bias.to(inputs.dtype)
