"""Recurrent layers in torch: short convolutions, gated delta rules and Mamba-2, token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.collective.base import Link
from worker.families.recurrence import DeltaRule, Mamba, Recurrence, ShortConvolution, attends, recurs
from worker.kv.torch.slab_attention import SlabAttention, StateTensors


def _type_of_states(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _sequences(cache_step: SlabAttention) -> Iterator[tuple[StateTensors, slice]]:
    """The state of each of the step's sequences, and its rows of the flat batch."""
    first = 0
    for extent, state in zip(cache_step.extents, cache_step.states, strict=True):
        yield state, slice(first, first + extent.count)
        first += extent.count


def _mixed(window: Tensor, inputs: Tensor, filter: Tensor) -> Tensor:
    """One sequence's new inputs (T, channels) through a convolution; its window moves on."""
    whole = torch.cat([window, inputs])
    taps = filter.to(inputs.dtype)
    mixed = torch.einsum("tci,ic->tc", whole.unfold(0, len(taps), 1), taps)
    window.copy_(whole[len(inputs) :])
    return mixed


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
        wider = _type_of_states(hidden_states)
        inputs = (before * values).to(wider)
        out = torch.empty_like(after)
        for state, rows in _sequences(cache_step):
            out[rows] = after[rows] * self._convolved(state, inputs[rows]).to(after.dtype)
        return self.projections.out_proj(out).unsqueeze(0)

    def _convolved(self, state: StateTensors, inputs: Tensor) -> Tensor:
        mixed = _mixed(state.window(self.layer), inputs, self.filter)
        return mixed if self.bias is None else mixed + self.bias.to(inputs.dtype)


# Linear attention by the gated delta rule (https://arxiv.org/abs/2412.06464), computed by torch.


EPSILON = 1e-6
"""Added to the squares of a query or key before their root."""


class GatedDelta(nn.Module):
    """A recurrent layer of this rank's heads, over a flat batch.

    Queries, keys and values pass a causal convolution. Each value head keeps a matrix S (key dim, value dim); a token
    gives S ← γ·S + k·(β·(v - γ·Sᵀk))ᵀ and Sᵀq, which is normed and gated. `layer` counts the recurrent layers.
    """

    def __init__(self, loaded: Any, config: Any, layer: int, tiled: bool = False) -> None:
        """`loaded` is the module of transformers, or one with its names, that holds this rank's weights. `tiled`: value
        head h belongs to key head h mod `key_heads`."""
        super().__init__()
        self.projections = loaded
        self.layer = layer
        self.tiled = tiled
        self.key_dim = config.linear_key_head_dim
        self.value_dim = config.linear_value_head_dim
        self.value_heads = loaded.A_log.numel()
        self.key_heads = self.value_heads * config.linear_num_key_heads // config.linear_num_value_heads
        self.group = self.value_heads // self.key_heads
        """Value heads that share a key head."""
        self.by_head = hasattr(loaded, "in_proj_qkvz")
        """True if the outputs of the projections lie by key head; else those of all heads lie together."""
        self.filter = nn.Parameter(loaded.conv1d.weight[:, 0].t().contiguous(), requires_grad=False)
        """Of the convolution: (taps, channels), the newest input last."""
        self.decay = nn.Parameter(-loaded.A_log.double().exp().to(loaded.A_log.dtype), requires_grad=False)
        self.decay_bias = loaded.dt_bias
        self.norm_weight = loaded.norm.weight
        self.eps: float = config.rms_norm_eps
        del loaded.conv1d, loaded.norm, loaded.A_log, loaded.dt_bias

    def forward(self, hidden_states: Tensor, *, cache_step: SlabAttention, **_: Any) -> Tensor:
        """hidden_states (1, T, hidden) → (1, T, hidden); advances the states of the step's sequences."""
        inputs, gate, learning, keeping = self._projected(hidden_states[0])
        out = torch.empty(len(inputs), self.value_heads, self.value_dim, dtype=inputs.dtype)
        for state, rows in _sequences(cache_step):
            self._advance(state, inputs[rows], learning[rows], keeping[rows], out[rows])
        normed = functional.rms_norm(out, (self.value_dim,), self.norm_weight.to(out.dtype), self.eps)
        gated = (normed * functional.silu(gate)).to(hidden_states.dtype)
        return self.projections.out_proj(gated.flatten(1)).unsqueeze(0)

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side (T, channels), gates (T, value heads, value dim), and of each value
        head β and γ (T, value heads), in the type of states."""
        of = self.projections
        wide = self.group * self.value_dim
        wider = _type_of_states(hidden)
        if self.by_head:
            joined = of.in_proj_qkvz(hidden).view(len(hidden), self.key_heads, -1)
            parts = joined.split([self.key_dim, self.key_dim, wide, wide], -1)
            inputs = torch.cat([part.flatten(1) for part in parts[:3]], -1)
            gate = parts[3]
            learning, rate = of.in_proj_ba(hidden).view(len(hidden), self.key_heads, -1).chunk(2, -1)
        else:
            inputs = of.in_proj_qkv(hidden)
            gate = of.in_proj_z(hidden)
            learning = of.in_proj_b(hidden)
            rate = of.in_proj_a(hidden)
        step = functional.softplus(rate.flatten(1).to(wider) + self.decay_bias)
        return (
            inputs.to(wider),
            gate.reshape(len(hidden), self.value_heads, self.value_dim).to(wider),
            learning.flatten(1).to(wider).sigmoid(),
            (self.decay * step).exp(),
        )

    def _advance(self, state: StateTensors, inputs: Tensor, learning: Tensor, keeping: Tensor, out: Tensor) -> None:
        """Run one sequence's new tokens through its state."""
        query, key, value = self._convolved(state.window(self.layer), inputs)
        matrices = state.matrices(self.layer)
        for token in range(len(inputs)):
            matrices.mul_(keeping[token, :, None, None])
            recalled = torch.einsum("hkv,hk->hv", matrices, key[token])
            change = (value[token] - recalled) * learning[token, :, None]
            matrices.add_(key[token, :, :, None] * change[:, None, :])
            out[token] = torch.einsum("hkv,hk->hv", matrices, query[token])

    def _convolved(self, window: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys (T, value heads, key dim), of length 1 before the queries' scale, and values (T, value
        heads, value dim)."""
        mixed = functional.silu(_mixed(window, inputs, self.filter))
        wide = self.key_heads * self.key_dim
        query, key, value = mixed.split([wide, wide, self.value_heads * self.value_dim], -1)
        return (
            self._normed(query) * self.key_dim**-0.5,
            self._normed(key),
            value.view(len(inputs), self.value_heads, self.value_dim),
        )

    def _normed(self, rows: Tensor) -> Tensor:
        heads = rows.view(len(rows), self.key_heads, self.key_dim)
        scale = (heads.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
        if self.tiled:
            return (heads * scale).repeat(1, self.group, 1)
        return (heads * scale).repeat_interleave(self.group, dim=1)


# Mamba-2 layers (https://arxiv.org/abs/2405.21060), computed by torch.


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
        wider = _type_of_states(hidden)
        inner = self.heads * self.head_dim
        of_groups = self.groups * self.state
        projected = self.projections.in_proj(hidden * self.in_scale).to(wider) * self.output_scales.to(wider)
        gate, inputs, rates = projected.split([inner, inner + 2 * of_groups, self.heads], -1)
        steps = functional.softplus(rates + self.step_bias)
        out = torch.empty(len(hidden), inner, dtype=wider)
        for state, rows in _sequences(cache_step):
            self._advance(state, inputs[rows], steps[rows], out[rows])
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
            increment = values[token] * steps[token, :, None]
            matrices.mul_(keeping[token, :, None, None])
            matrices.add_(into[token, :, :, None] * increment[:, None, :])
            read = torch.einsum("hsd,hs->hd", matrices, out_of[token])
            out[token] = (read + self.skip[:, None] * values[token]).flatten()

    def _by_head(self, of_groups: Tensor) -> Tensor:
        """B or C of each group (T, groups · state) as each head has it: (T, heads, state)."""
        by_group = of_groups.view(-1, self.groups, self.state)
        return by_group.repeat_interleave(self.heads // self.groups, dim=1)

    def _convolved(self, window: Tensor, inputs: Tensor) -> Tensor:
        """(T, channels); the last inputs stay in the window."""
        mixed = _mixed(window, inputs, self.filter)
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


def install(model: Any, recurrent: Recurrence, link: Link) -> None:
    """Replace the recurrent layers' modules, which hold this rank's weights, by Furrow's. Layers with attention are
    numbered among themselves: only they have keys and values."""
    attention = number = 0
    for layer, kind in zip(model.model.layers, recurrent.kinds, strict=True):
        if recurs(kind):
            match recurrent:
                case DeltaRule():
                    layer.linear_attn = GatedDelta(layer.linear_attn, model.config, number, recurrent.tiled)
                case ShortConvolution():
                    layer.conv = GatedConvolution(layer.conv, number)
                case Mamba():
                    name = "mixer" if hasattr(layer, "mixer") else "mamba"
                    loaded = getattr(layer, name)
                    setattr(layer, name, MambaLayer(loaded, model.config, recurrent, number, link))
                case _:
                    raise NotImplementedError(type(recurrent).__name__)
            number += 1
        if attends(kind):
            attending = layer.mixer if hasattr(layer, "mixer") else layer.self_attn
            attending.layer_idx = attention
            attention += 1
