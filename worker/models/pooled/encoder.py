"""Encoders of BERT's form over a flat batch: BERT, RoBERTa and XLM-RoBERTa, with their parameters' names.

Source: Devlin et al., BERT; the order of norms, the positions and the heads are those of transformers' modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.kernels.variant import Variant
from worker.kv.base import CacheStep
from worker.repository.pooling.gate import ENCODERS, padding_id

_gelu_tanh = functools.partial(functional.gelu, approximate="tanh")
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
}


class Encoder(nn.Module):
    """Embeddings and layers; a caller's `logits` are the hidden states of the places that it wants."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.embeddings = _Embeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(_Layer(config, index) for index in range(config["num_hidden_layers"]))

    @property
    def base_model(self) -> Any:
        return SimpleNamespace(layers=self.encoder.layer)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        cache_step: CacheStep,
        token_type_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> Any:
        """Ids, positions and types (1, T) of all sequences one after the other; `logits` (1, places, hidden)."""
        types = torch.zeros_like(input_ids[0]) if token_type_ids is None else token_type_ids[0]
        hidden = self.embeddings(input_ids[0], position_ids[0], types)
        for layer in self.encoder.layer:  # type: ignore[union-attr]  # a list of modules
            hidden = layer(hidden, cache_step)
        return SimpleNamespace(logits=hidden[logits_to_keep].unsqueeze(0))


class _Embeddings(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, types = config["hidden_size"], config.get("type_vocab_size", 2)
        self.word_embeddings = nn.Embedding(config["vocab_size"], hidden)
        self.position_embeddings = nn.Embedding(config["max_position_embeddings"], hidden)
        self.token_type_embeddings = nn.Embedding(types, hidden)
        self.LayerNorm = _norm(config)
        self._first = ENCODERS[config["model_type"]] * (padding_id(config) + 1)
        self._types = types

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        summed = self.word_embeddings(ids) + self.token_type_embeddings(types.clamp(max=self._types - 1))
        return self.LayerNorm(summed + self.position_embeddings(positions + self._first))


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.attention = nn.Module()
        self.attention.self = _Attention(config, index)
        self.attention.output = _Output(config, hidden)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(hidden, inner)
        self.output = _Output(config, inner)
        self._activation = _ACTIVATIONS[config.get("hidden_act", "gelu")]

    def forward(self, hidden: Tensor, cache_step: CacheStep) -> Tensor:
        attended = self.attention.output(self.attention.self(hidden, cache_step), hidden)  # type: ignore[operator]  # modules
        inner = self._activation(self.intermediate.dense(attended))  # type: ignore[operator]  # a module
        return self.output(inner, attended)


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self._index, self._heads = index, config["num_attention_heads"]
        self._variant = Variant(scaling=(hidden // self._heads) ** -0.5)

    def forward(self, hidden: Tensor, cache_step: CacheStep) -> Tensor:
        query, key, value = (
            linear(hidden).view(len(hidden), self._heads, -1).transpose(0, 1)
            for linear in (self.query, self.key, self.value)
        )
        return cache_step.attend(self._index, query, key, value, self._variant).flatten(1)


class _Output(nn.Module):
    """A projection that is added to what came in, and a norm."""

    def __init__(self, config: dict[str, Any], inputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config["hidden_size"])
        self.LayerNorm = _norm(config)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden) + before)


def _norm(config: dict[str, Any]) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], eps=config.get("layer_norm_eps", 1e-12))
