"""The modules that replace transformers' where ranks must exchange something. They exist only at tp 2 and more."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from worker.collective import Collective


class Link:
    """The group that a model's modules talk through; exchanged as one when a new epoch joins a new group."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective


class RowParallelLinear(nn.Module):
    """y = Σ over ranks of x_rank · W_rankᵀ, then the bias once. x (…, inputs / ranks) → y (…, outputs)."""

    def __init__(self, linear: nn.Linear, link: Link) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._link = link

    def forward(self, inputs: Tensor) -> Tensor:
        partial = self._link.collective.all_reduce(functional.linear(inputs, self.weight))
        return partial if self.bias is None else partial + self.bias


class ReducedExperts(nn.Module):
    """Experts whose inner width is split: each rank's output is a partial sum."""

    def __init__(self, experts: nn.Module, link: Link) -> None:
        super().__init__()
        self.experts = experts
        self._link = link

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._link.collective.all_reduce(self.experts(*args, **kwargs).contiguous())


class VocabParallelEmbedding(nn.Module):
    """Each rank looks up the ids from `start` on that it holds; ids of others give zeros, and the sum is complete."""

    def __init__(self, embedding: nn.Embedding, start: int, link: Link) -> None:
        super().__init__()
        # Kept as a module: some families scale in their embedding's own forward.
        self.embedding = embedding
        self._start, self._link = start, link

    @property
    def weight(self) -> Tensor:
        return self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self._start
        mine = (local >= 0) & (local < self.embedding.weight.shape[0])
        found = self.embedding(local.where(mine, 0))
        return self._link.collective.all_reduce(found.masked_fill(~mine.unsqueeze(-1), 0))


class VocabParallelHead(nn.Module):
    """Each rank scores its part of the vocabulary; all ranks get the whole. The last rank's part may be padded."""

    def __init__(self, head: nn.Linear, vocab_size: int, link: Link) -> None:
        super().__init__()
        self.weight, self.bias = head.weight, head.bias
        self._vocab_size, self._link = vocab_size, link

    def forward(self, hidden: Tensor) -> Tensor:
        local = functional.linear(hidden, self.weight, self.bias)
        if not local.numel():
            return local.new_empty(*local.shape[:-1], self._vocab_size)
        return self._link.collective.all_gather(local)[..., : self._vocab_size]


def replace(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `root` has `name` (dotted)."""
    parent, _, leaf = name.rpartition(".")
    setattr(root.get_submodule(parent), leaf, module)


def cut_embedding(embedding: nn.Embedding) -> None:
    """Correct what an embedding believes of itself after its rows were cut."""
    embedding.num_embeddings = embedding.weight.shape[0]
    # Only training reads padding_idx, and torch refuses one that is outside of the rank's rows.
    embedding.padding_idx = None
