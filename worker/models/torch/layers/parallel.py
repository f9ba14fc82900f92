"""The modules that replace transformers' where ranks must exchange something. They exist only at tp 2 and more."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from worker.collective.base import Link
from worker.weights.sharding import ShardPlan, padded_share


class RowParallelLinear(nn.Module):
    """y = Σ over ranks of x_rank · W_rankᵀ, then the bias once. x (…, inputs / ranks) → y (…, outputs). `partial` is
    this rank's product, without a bias."""

    def __init__(self, partial: nn.Module, bias: Tensor | None, link: Link) -> None:
        super().__init__()
        self.partial = partial
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self._link = link

    @property
    def is_first(self) -> bool:
        """True on rank 0."""
        return self._link.collective.rank == 0

    def forward(self, inputs: Tensor) -> Tensor:
        whole = self._link.collective.all_reduce(self.partial(inputs))
        return whole if self.bias is None else whole + self.bias


class ReducedExperts(nn.Module):
    """Experts whose inner width is split: each rank's output is a partial sum."""

    def __init__(self, experts: nn.Module, link: Link) -> None:
        super().__init__()
        self.experts = experts
        self._link = link

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._link.collective.all_reduce(self.experts(*args, **kwargs).contiguous())


class WidthNorm(nn.Module):
    """x / sqrt(mean(x²) + ε) · weight over a width that is split over the ranks: the ranks sum their squares."""

    def __init__(self, norm: Any, link: Link) -> None:
        super().__init__()
        self.weight = norm.weight
        self._eps = norm.variance_epsilon
        self._link = link

    def forward(self, hidden: Tensor) -> Tensor:
        wide = hidden.to(torch.float32)
        collective = self._link.collective
        squares = collective.all_reduce(wide.square().sum(-1, keepdim=True))
        # Heads that several ranks keep count several times in both.
        width = wide.shape[-1] * collective.world_size
        return (self.weight * (wide * torch.rsqrt(squares / width + self._eps))).to(hidden.dtype)


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the ids from `start` on that it holds; ids of others give zeros, and the sum is complete."""

    def __init__(self, embedding: Any, start: int, link: Link) -> None:
        super().__init__()
        # Kept as a module: some families scale in their embedding's own forward.
        self.embedding = embedding
        self._start = start
        self._link = link

    @classmethod
    def of(cls, embedding: nn.Module, start: int, link: Link) -> VocabParallelEmbedding:
        """Around an embedding whose weights hold this rank's rows, from `start` on."""
        if isinstance(embedding, nn.Embedding):
            # Its own sizes, after its rows were cut. Only training reads padding_idx, and torch refuses one
            # that is outside of the rank's rows.
            embedding.num_embeddings = embedding.weight.shape[0]
            embedding.padding_idx = None
        return cls(embedding, start, link)

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self._start
        mine = (local >= 0) & (local < self.embedding.weight.shape[0])
        vectors = self.embedding(local.where(mine, 0))
        return self._link.collective.all_reduce(vectors.masked_fill(~mine.unsqueeze(-1), 0))


class VocabParallelHead(nn.Module):
    """Each rank scores its part of the vocabulary; all ranks get the whole. The last rank's part may be padded."""

    def __init__(self, head: nn.Module, vocab_size: int, link: Link) -> None:
        super().__init__()
        self.head = head
        self._vocab_size = vocab_size
        self._link = link

    def forward(self, hidden: Tensor) -> Tensor:
        if not hidden.numel():
            return hidden.new_empty(*hidden.shape[:-1], self._vocab_size)
        return self._link.collective.all_gather(self.head(hidden))[..., : self._vocab_size]


def split_vocabulary(model: Any, plan: ShardPlan, link: Link) -> None:
    """Wrap embedding and head, whose weights hold this rank's rows already."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    vocab_size = model.config.vocab_size
    start, _, _ = padded_share(vocab_size, plan.rank, plan.world_size)
    model.set_output_embeddings(VocabParallelHead(head, vocab_size, link))
    model.set_input_embeddings(VocabParallelEmbedding.of(embedding, start, link))


def split_layers(model: nn.Module, plan: ShardPlan, link: Link) -> None:
    """Wrap or adjust the modules that hold this rank's part by now and are no linear layers."""
    for name, module in list(model.named_modules()):
        role = plan.role(name)
        if role is None:  # also of parts of a module that was wrapped here
            continue
        path, _, leaf = name.rpartition(".")
        parent: Any = model.get_submodule(path)
        match role:
            case "experts":
                setattr(parent, leaf, ReducedExperts(module, link))
            case "width_norm" if hasattr(module, "variance_epsilon"):  # transformers'; C++ sums squares itself
                setattr(parent, leaf, WidthNorm(module, link))
            case "query_key_value" if hasattr(parent, "config"):
                # The modelling code cuts the product by the numbers of heads.
                parent.config = copy.copy(parent.config)
                parent.config.num_attention_heads = plan.local_heads
                parent.num_key_value_heads = plan.local_kv_heads
            case _:
                pass
