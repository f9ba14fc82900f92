"""ModernBERT over a flat batch, with its parameters' names: norms before, rotary positions, gates, local layers.

Source: Warner et al., ModernBERT; the order of norms, gates and windows is that of transformers' modules.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from worker.kv.base import Variant
from worker.kv.torch.whole_attention import WholeAttention
from worker.models.torch.pooled.encoder import ACTIVATIONS, Embedding, Encoder, Linear
from worker.models.torch.pooled.row_threads import RowThreads
from worker.repository.pooling.encoders import SLIDING

Turn = tuple[Tensor, Tensor]
"""Cosines and sines (T, head dim) of a type of layer."""


class ModernEncoder(Encoder):
    def __init__(self, config: dict[str, Any], threads: RowThreads) -> None:
        super().__init__(config, threads)
        self.embeddings = nn.Module()
        self.embeddings.tok_embeddings = Embedding(config["vocab_size"], config["hidden_size"])
        self.embeddings.norm = _norm(config)
        self.layers = nn.ModuleList(_Layer(config, index) for index in range(config["num_hidden_layers"]))
        self.final_norm = _norm(config)
        self._thetas: dict[str, float] = config["thetas"]
        self._dim = config["hidden_size"] // config["num_attention_heads"]

    def hidden(self, ids: Tensor, positions: Tensor, types: Tensor, step: WholeAttention) -> Tensor:
        hidden = self.embeddings.norm(self.embeddings.tok_embeddings(ids))  # type: ignore[operator]  # modules
        turns = {kind: self._turn(theta, positions, hidden.dtype) for kind, theta in self._thetas.items()}
        for layer in self.layers:
            hidden = layer(hidden, step, turns)
        return self.final_norm(hidden)

    def _turn(self, theta: float, positions: Tensor, dtype: torch.dtype) -> Turn:
        """Angles are float32, as transformers has them."""
        places = torch.arange(0, self._dim, 2, dtype=torch.float32, device=positions.device)
        angles = positions.float()[:, None] * (1.0 / theta ** (places / self._dim))
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        self.attn_norm = _norm(config) if index else nn.Identity()
        self.attn = _Attention(config, index)
        self.mlp_norm = _norm(config)
        self.mlp = _Gated(config)
        self._kind: str = config["layer_types"][index]

    def forward(self, hidden: Tensor, step: WholeAttention, turns: dict[str, Turn]) -> Tensor:
        hidden = hidden + self.attn(self.attn_norm(hidden), step, turns[self._kind])
        return hidden + self.mlp(self.mlp_norm(hidden))


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        biased = config.get("attention_bias", False)
        self.Wqkv = Linear(hidden, 3 * hidden, bias=biased)
        self.Wo = Linear(hidden, hidden, bias=biased)
        self._index = index
        self._heads = config["num_attention_heads"]
        local = config["layer_types"][index] == SLIDING
        # A position sees those up to half of `local_attention` away.
        window = config["local_attention"] // 2 + 1 if local else None
        self._variant = Variant(scaling=(hidden // self._heads) ** -0.5, window=window)

    def forward(self, hidden: Tensor, step: WholeAttention, turn: Turn) -> Tensor:
        query, key, value = self.Wqkv(hidden).view(len(hidden), 3, self._heads, -1).permute(1, 2, 0, 3)
        return self.Wo(
            step.attend(self._index, _turned(query, turn), _turned(key, turn), value, self._variant).flatten(1)
        )


class _Gated(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        biased = config.get("mlp_bias", False)
        self.Wi = Linear(hidden, 2 * inner, bias=biased)
        self.Wo = Linear(inner, hidden, bias=biased)
        self._activation = ACTIVATIONS[config.get("hidden_act", "gelu")]

    def forward(self, hidden: Tensor) -> Tensor:
        inner, gate = self.Wi(hidden).chunk(2, dim=-1)
        return self.Wo(self._activation(inner) * gate)


def _turned(heads: Tensor, turn: Turn) -> Tensor:
    """(heads, T, dim), turned by position."""
    cosines, sines = turn
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def _norm(config: dict[str, Any]) -> nn.LayerNorm:
    bias = config.get("norm_bias", False)
    return nn.LayerNorm(config["hidden_size"], eps=config.get("norm_eps", 1e-5), bias=bias)
