"""Mamba-2 layers (https://arxiv.org/abs/2405.21060), computed by torch."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from worker.collective.link import Link
from worker.families.mamba import Mamba
from worker.kv.slab_step import SlabStep
from worker.kv.states import State

NUMBERS_AT_ONCE = 32_768
"""Numbers of a state through which all tokens of a row pass together: a part of a second-level cache, and few enough
that torch starts no threads for each token."""


class MambaLayer(nn.Module):
    """A recurrent layer of this rank's heads, over a flat batch.

    Inputs x, B and C pass a causal convolution. Each head keeps a matrix S (state, head dim); a token with the step δ
    gives S ← exp(-a·δ)·S + B·(δ·x)ᵀ and Sᵀ·C + d·x, which is gated and then normed over all heads of the group.
    `layer` counts the recurrent layers.
    """

    def __init__(self, loaded: Any, config: Any, shape: Mamba, layer: int, link: Link) -> None:
        """`loaded` is the module of transformers that holds this rank's weights."""
        super().__init__()
        ranks = link.collective.world_size
        self.in_proj, self.out_proj = loaded.in_proj, loaded.out_proj
        self.layer, self.head_dim, self.state = layer, shape.head_dim, shape.state
        self.heads, self.groups = shape.heads // ranks, max(1, shape.groups // ranks)
        self._link = link if shape.groups % ranks else None
        """None where each group is whole on a rank."""
        self._all_groups, self._group_width = shape.groups, shape.heads * shape.head_dim // shape.groups
        self.filter = nn.Parameter(loaded.conv1d.weight[:, 0].t().contiguous(), requires_grad=False)
        """Of the convolution: (taps, channels), the newest input last."""
        self.filter_bias = loaded.conv1d.bias
        wider = torch.promote_types(loaded.A_log.dtype, torch.float32)
        self.decay = nn.Parameter(-loaded.A_log.double().exp().to(wider), requires_grad=False)
        self.step_bias, self.skip, self.norm_weight = loaded.dt_bias, loaded.D, loaded.norm.weight
        self.eps: float = config.rms_norm_eps

    def forward(self, hidden_states: Tensor, *, cache_step: SlabStep, **_: Any) -> Tensor:
        """hidden_states (1, T, hidden) → (1, T, hidden); advances the states of the step's sequences."""
        hidden = hidden_states[0]
        wider = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        inner, of_groups = self.heads * self.head_dim, self.groups * self.state
        gate, inputs, rates = self.in_proj(hidden).to(wider).split([inner, inner + 2 * of_groups, self.heads], -1)
        steps = _softplus(rates + self.step_bias)
        out = torch.empty(len(hidden), inner, dtype=wider)
        first = 0
        for extent, state in zip(cache_step.extents, cache_step.states, strict=True):
            rows = slice(first, first + extent.count)
            self._advance(state, inputs[rows], steps[rows], out[rows])
            first += extent.count
        normed = self._normed(out * _silu(gate))
        return self.out_proj(normed.to(hidden.dtype)).unsqueeze(0)

    def _advance(self, state: State, inputs: Tensor, steps: Tensor, out: Tensor) -> None:
        """Run one sequence's new tokens through its state, one by one: any chunks give the same bits."""
        count, share = len(inputs), self.heads // self.groups
        inner, of_groups = self.heads * self.head_dim, self.groups * self.state
        values, into, out_of = self._convolved(state.window(self.layer), inputs).split(
            [inner, of_groups, of_groups], -1
        )
        values = values.reshape(count, self.groups, share, 1, self.head_dim)
        into = into.reshape(count, self.groups, 1, self.state, 1)
        out_of = out_of.reshape(count, self.groups, 1, 1, self.state)
        keeping = (self.decay * steps).exp().view(count, self.groups, share, 1, 1)
        added = values * steps.view(count, self.groups, share, 1, 1)
        matrices = state.matrices(self.layer).view(self.groups, share, self.state, self.head_dim)
        places = out.view(count, self.groups, share, 1, self.head_dim)
        block = max(1, NUMBERS_AT_ONCE // (self.state * self.head_dim))
        for group, first in itertools.product(range(self.groups), range(0, share, block)):
            at = group, slice(first, first + block)
            some, read, written = matrices[at], out_of[:, group], into[:, group]
            kept, new, to = (each[:, group, first : first + block] for each in (keeping, added, places))
            for token in range(count):
                some.mul_(kept[token]).addcmul_(written[token], new[token])
                to[token] = read[token] @ some
        places.addcmul_(values, self.skip.to(out.dtype).view(self.groups, share, 1, 1))

    def _convolved(self, window: Tensor, inputs: Tensor) -> Tensor:
        """(T, channels); the last inputs stay in the window."""
        whole, taps = torch.cat([window, inputs]), self.filter.to(inputs.dtype)
        mixed = torch.einsum("tci,ic->tc", whole.unfold(0, len(taps), 1), taps)
        window.copy_(whole[len(inputs) :])
        return _silu(mixed if self.filter_bias is None else mixed + self.filter_bias)

    def _normed(self, gated: Tensor) -> Tensor:
        """Each group of heads divided by its root mean square; where ranks share a group they sum its squares."""
        by_group = gated.view(len(gated), self.groups, -1)
        squares = by_group.square().sum(-1, keepdim=True)
        if self._link is not None:
            collective = self._link.collective
            group = collective.rank * self._all_groups // collective.world_size
            every = squares.new_zeros(len(gated), self._all_groups)
            every[:, group] = squares[:, 0, 0]
            squares = collective.all_reduce(every)[:, group].view_as(squares)
        scale = torch.rsqrt(squares / self._group_width + self.eps)
        return (by_group * scale).flatten(1) * self.norm_weight.to(gated.dtype)


# torch's own have other bits in the last numbers of a tensor than in the others, so that chunks would matter.


def _silu(inputs: Tensor) -> Tensor:
    return inputs / (torch.exp(-inputs) + 1)


def _softplus(inputs: Tensor) -> Tensor:
    return torch.log1p(torch.exp(inputs.clamp(max=20))).where(inputs < 20, inputs)
