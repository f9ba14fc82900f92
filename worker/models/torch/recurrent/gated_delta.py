"""Linear attention by the gated delta rule (https://arxiv.org/abs/2412.06464), computed by torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.kv.torch.slab_attention import SlabAttention, StateTensors

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
        first = 0
        for extent, state in zip(cache_step.extents, cache_step.states, strict=True):
            rows = slice(first, first + extent.count)
            self._advance(state, inputs[rows], learning[rows], keeping[rows], out[rows])
            first += extent.count
        normed = functional.rms_norm(out, (self.value_dim,), self.norm_weight.to(out.dtype), self.eps)
        gated = (normed * functional.silu(gate)).to(hidden_states.dtype)
        return self.projections.out_proj(gated.flatten(1)).unsqueeze(0)

    def _projected(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values side by side (T, channels), gates (T, value heads, value dim), and of each value
        head β and γ (T, value heads), in the type of states."""
        of = self.projections
        wide = self.group * self.value_dim
        wider = torch.float64 if hidden.dtype == torch.float64 else torch.float32
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
        whole = torch.cat([window, inputs])
        taps = self.filter.to(inputs.dtype)
        count = len(inputs)
        mixed = functional.silu(torch.einsum("tci,ic->tc", whole.unfold(0, len(taps), 1), taps))
        window.copy_(whole[count:])
        wide = self.key_heads * self.key_dim
        query, key, value = mixed.split([wide, wide, self.value_heads * self.value_dim], -1)
        return (
            self._normed(query) * self.key_dim**-0.5,
            self._normed(key),
            value.view(count, self.value_heads, self.value_dim),
        )

    def _normed(self, rows: Tensor) -> Tensor:
        heads = rows.view(len(rows), self.key_heads, self.key_dim)
        scale = (heads.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
        if self.tiled:
            return (heads * scale).repeat(1, self.group, 1)
        return (heads * scale).repeat_interleave(self.group, dim=1)
