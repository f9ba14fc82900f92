"""Encoders of BERT's form over a flat batch, with BERT's names of parameters: BERT, RoBERTa, DistilBERT, MPNet.

Source: Devlin et al., BERT; Song et al., MPNet. The order of norms, the positions and the heads are those of
transformers' modules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from worker.kv.base import Variant
from worker.kv.torch.whole_attention import Bias, WholeAttention
from worker.models.torch.pooled.row_threads import RowThreads
from worker.repository.pooling.encoders import ENCODERS, first_position

_gelu_tanh = functools.partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
}

_BUCKETS = 32


class Linear(nn.Linear):
    """Its parameters come from a checkpoint: to initialise them on the meta device would import torch's compiler."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """As `Linear`."""

    def reset_parameters(self) -> None:
        pass


class Encoder(nn.Module):
    """An encoder over a flat batch; a caller's `logits` are the hidden states of the places that it wants."""

    layers: nn.ModuleList

    def __init__(self, config: dict[str, Any], threads: RowThreads) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self._threads = threads

    @property
    def base_model(self) -> Any:
        return SimpleNamespace(layers=self.layers)

    def hidden(self, ids: Tensor, positions: Tensor, types: Tensor, step: WholeAttention) -> Tensor:
        """The hidden states (T, hidden) of neighbouring sequences; ids, positions and types are (T,)."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        cache_step: WholeAttention,
        token_type_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> Any:
        """Ids, positions and types (1, T) of all sequences one after the other; `logits` (1, places, hidden)."""
        ids = input_ids[0]
        positions = position_ids[0]
        types = torch.zeros_like(ids) if token_type_ids is None else token_type_ids[0]

        def compute(rows: slice) -> Tensor:
            tokens, step = cache_step.part(rows)
            return self.hidden(ids[tokens], positions[tokens], types[tokens], step)

        parts = self._threads.run([extent.count for extent in cache_step.extents], compute)
        return SimpleNamespace(logits=torch.cat(parts)[logits_to_keep].unsqueeze(0))


class BertEncoder(Encoder):
    def __init__(self, config: dict[str, Any], threads: RowThreads) -> None:
        super().__init__(config, threads)
        self.embeddings = _Embeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(_Layer(config, index) for index in range(config["num_hidden_layers"]))
        self.layers = self.encoder.layer
        self._relative = ENCODERS[config["model_type"]].relative
        if self._relative:
            self.encoder.relative_attention_bias = Embedding(_BUCKETS, config["num_attention_heads"])

    def hidden(self, ids: Tensor, positions: Tensor, types: Tensor, step: WholeAttention) -> Tensor:
        hidden = self.embeddings(ids, positions, types)
        bias = functools.cache(self._bias) if self._relative else None
        for layer in self.layers:
            hidden = layer(hidden, step, bias)
        return hidden

    def _bias(self, count: int) -> Tensor:
        """(1, heads, count, count): MPNet's learned bias of a position (row) for another one (column)."""
        weight: Tensor = self.encoder.relative_attention_bias.weight  # type: ignore[assignment, union-attr]  # a module
        places = torch.arange(count, device=weight.device)
        behind = places[:, None] - places[None, :]
        return weight[_bucket(behind)].permute(2, 0, 1).unsqueeze(0)


def _bucket(behind: Tensor) -> Tensor:
    """The bucket of each distance: half of them for later positions; small distances have one of their own, and those
    up to 128 share the others logarithmically."""
    half = _BUCKETS // 2
    exact = _BUCKETS // 4
    away = behind.abs()
    large = exact + (torch.log(away.float() / exact) / math.log(128 / exact) * (half - exact)).long()
    return (behind < 0).long() * half + torch.where(away < exact, away, large.clamp(max=half - 1))


class _Embeddings(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        types = config.get("type_vocab_size", 2) if ENCODERS[config["model_type"]].types else 0
        self.word_embeddings = Embedding(config["vocab_size"], hidden)
        self.position_embeddings = Embedding(config["max_position_embeddings"], hidden)
        self.token_type_embeddings = Embedding(types, hidden) if types else None
        self.LayerNorm = _norm(config)
        self._first = first_position(config)
        self._types = types

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        summed = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            summed = summed + self.token_type_embeddings(types.clamp(max=self._types - 1))
        return self.LayerNorm(summed + self.position_embeddings(positions + self._first))


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        self.attention = nn.Module()
        self.attention.self = _Attention(config, index)
        self.attention.output = _Output(config, hidden)
        self.intermediate = nn.Module()
        self.intermediate.dense = Linear(hidden, inner)
        self.output = _Output(config, inner)
        self._activation = ACTIVATIONS[config.get("hidden_act", "gelu")]

    def forward(self, hidden: Tensor, step: WholeAttention, bias: Bias | None) -> Tensor:
        attended = self.attention.output(self.attention.self(hidden, step, bias), hidden)  # type: ignore[operator]  # modules
        inner = self._activation(self.intermediate.dense(attended))  # type: ignore[operator]  # a module
        return self.output(inner, attended)


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.query, self.key, self.value = (Linear(hidden, hidden) for _ in range(3))
        self._index = index
        self._heads = config["num_attention_heads"]
        self._variant = Variant(scaling=(hidden // self._heads) ** -0.5)

    def forward(self, hidden: Tensor, step: WholeAttention, bias: Bias | None) -> Tensor:
        query, key, value = (
            linear(hidden).view(len(hidden), self._heads, -1).transpose(0, 1)
            for linear in (self.query, self.key, self.value)
        )
        return step.attend(self._index, query, key, value, self._variant, bias).flatten(1)


class _Output(nn.Module):
    """A projection that is added to what came in, and a norm."""

    def __init__(self, config: dict[str, Any], inputs: int) -> None:
        super().__init__()
        self.dense = Linear(inputs, config["hidden_size"])
        self.LayerNorm = _norm(config)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden) + before)


def _norm(config: dict[str, Any]) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], eps=config.get("layer_norm_eps", 1e-12))
