"""Mamba-2 layers (https://arxiv.org/abs/2405.21060), computed by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.collective.base import Link
from worker.families.mamba import Mamba
from worker.kv.torch.slab_attention import SlabAttention, StateTensors

EPSILONS = ("rms_norm_eps", "layer_norm_epsilon")
"""Names that transformers' classes have for the number of their norms."""


class MambaLayer(nn.Module):
    """A recurrent layer of this rank's heads, over a flat batch.

    Inputs x, B and C pass a causal convolution. Each head keeps a matrix S (state, head dim); a token with the step δ
    gives S ← exp(-a·δ)·S + B·(δ·x)ᵀ and Sᵀ·C + d·x, which is gated and, before or after that or not at all, normed over
    all heads of the group.
    `layer` counts the recurrent layers.
    """

    def __init__(self, loaded: Any, config: Any, shape: Mamba, layer: int, link: Link) -> None:
        """`loaded` is the module of transformers, or one with its names, that holds this rank's weights."""
        super().__init__()
        ranks = link.collective.world_size
        rank = link.collective.rank
        self.projections = loaded
        self.layer = layer
        self.head_dim = shape.head_dim
        self.state = shape.state
        self.heads = shape.heads // ranks
        self.groups = max(1, shape.groups // ranks)
        self.group_width = shape.heads * shape.head_dim // shape.groups
        """Numbers of a group of heads, on all ranks that share it."""
        shared = shape.groups % ranks != 0
        self.norm_groups = shape.groups if shared else self.groups
        self.first_group = rank * shape.groups // ranks if shared else 0
        """The first of this rank's groups among the `norm_groups` whose squares are summed."""
        self._link = link if shared else None
        self.filter = nn.Parameter(loaded.conv1d.weight[:, 0].t().contiguous(), requires_grad=False)
        """Of the convolution: (taps, channels), the newest input last."""
        self.filter_bias: Tensor | None = getattr(loaded.conv1d, "bias", None)
        wider = torch.promote_types(loaded.A_log.dtype, torch.float32)
        self.decay = nn.Parameter(-loaded.A_log.double().exp().to(wider), requires_grad=False)
        self.step_bias = loaded.dt_bias
        self.skip = loaded.D
        self.norm = shape.norm
        self.norm_weight: Tensor | None = None if shape.norm is None else loaded.norm.weight
        self.eps: float = next(getattr(config, name) for name in EPSILONS if hasattr(config, name))
        self.in_scale = shape.in_scale
        widths = self.heads * self.head_dim, self.heads * self.head_dim, *[self.groups * self.state] * 2, self.heads
        scales = torch.tensor(shape.scales, dtype=torch.float64).repeat_interleave(torch.tensor(widths))
        self.register_buffer("output_scales", scales, persistent=False)
        del loaded.conv1d, loaded.norm, loaded.A_log, loaded.dt_bias, loaded.D

    def forward(self, hidden_states: Tensor, *, cache_step: SlabAttention, **_: Any) -> Tensor:
        """hidden_states (1, T, hidden) → (1, T, hidden); advances the states of the step's sequences."""
        hidden = hidden_states[0]
        wider = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        inner = self.heads * self.head_dim
        of_groups = self.groups * self.state
        projected = self.projections.in_proj(hidden * self.in_scale).to(wider) * self.output_scales.to(wider)
        gate, inputs, rates = projected.split([inner, inner + 2 * of_groups, self.heads], -1)
        steps = functional.softplus(rates + self.step_bias)
        out = torch.empty(len(hidden), inner, dtype=wider)
        first = 0
        for extent, state in zip(cache_step.extents, cache_step.states, strict=True):
            rows = slice(first, first + extent.count)
            self._advance(state, inputs[rows], steps[rows], out[rows])
            first += extent.count
        if self.norm == "before_gate":
            normed = self._normed(out) * functional.silu(gate)
        else:
            normed = self._normed(out * functional.silu(gate))
        return self.projections.out_proj(normed.to(hidden.dtype)).unsqueeze(0)

    def _advance(self, state: StateTensors, inputs: Tensor, steps: Tensor, out: Tensor) -> None:
        """Run one sequence's new tokens through its state."""
        inner = self.heads * self.head_dim
        of_groups = self.groups * self.state
        mixed = self._convolved(state.window(self.layer), inputs)
        values, into, out_of = mixed.split([inner, of_groups, of_groups], -1)
        values = values.view(-1, self.heads, self.head_dim)
        into = self._by_head(into)
        out_of = self._by_head(out_of)
        matrices = state.matrices(self.layer)
        keeping = (self.decay * steps).exp()
        for token in range(len(inputs)):
            added = values[token] * steps[token, :, None]
            matrices.mul_(keeping[token, :, None, None])
            matrices.add_(into[token, :, :, None] * added[:, None, :])
            read = torch.einsum("hsd,hs->hd", matrices, out_of[token])
            out[token] = (read + self.skip[:, None] * values[token]).flatten()

    def _by_head(self, of_groups: Tensor) -> Tensor:
        """B or C of each group (T, groups · state) as each head has it: (T, heads, state)."""
        by_group = of_groups.view(-1, self.groups, self.state)
        return by_group.repeat_interleave(self.heads // self.groups, dim=1)

    def _convolved(self, window: Tensor, inputs: Tensor) -> Tensor:
        """(T, channels); the last inputs stay in the window."""
        whole = torch.cat([window, inputs])
        taps = self.filter.to(inputs.dtype)
        mixed = torch.einsum("tci,ic->tc", whole.unfold(0, len(taps), 1), taps)
        window.copy_(whole[len(inputs) :])
        return functional.silu(mixed if self.filter_bias is None else mixed + self.filter_bias)

    def _normed(self, gated: Tensor) -> Tensor:
        """Each group of heads divided by its root mean square; where ranks share a group they sum its squares."""
        if self.norm_weight is None:
            return gated
        by_group = gated.view(len(gated), self.groups, -1)
        squares = by_group.square().sum(-1, keepdim=True)
        if self._link is not None:
            every = squares.new_zeros(len(gated), self.norm_groups)
            every[:, self.first_group] = squares[:, 0, 0]
            squares = self._link.collective.all_reduce(every)[:, self.first_group].view_as(squares)
        scale = torch.rsqrt(squares / self.group_width + self.eps)
        return (by_group * scale).flatten(1) * self.norm_weight.to(gated.dtype)
