"""Weights of a rank in a model whose forward is C++: of each tensor only the kept part is read, packed and released."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worker.collective.base import Link
from worker.families.recurrence import Recurrence
from worker.models.native import recurrent
from worker.models.native.linear import (
    HALVES,
    Embedding,
    PackedEmbedding,
    PackedExperts,
    PackedLinear,
    SplitEmbedding,
    kept_as,
)
from worker.models.native.module import Module, Unfilled
from worker.models.native.modules import LAYERS_TABLE, CausalModel, Linear
from worker.models.shard import (
    DOWN,
    GATE_UP,
    LinearGroup,
    RankWeights,
    are_experts,
    groups_of,
    have_biases,
    rounded,
    sizes_of,
)
from worker.native.library import Threads
from worker.weights.checkpoint import StoredTensors
from worker.weights.quantizer import Quantizer
from worker.weights.sharding import ShardPlan
from worker.weights.stored_matrix import StoredMatrix


@dataclass(frozen=True)
class NativeLoader:
    """Loads a model's weights. `tell` is called with the share of the checkpoint that was read."""

    model: CausalModel
    checkpoint: StoredTensors
    plan: ShardPlan
    link: Link
    threads: Threads
    quant: str | None
    tell: Callable[[float], None]
    quantizer: Quantizer | None = None
    """Makes blocks of the weights of linear layers and of the vocabulary."""
    storage: np.dtype[Any] | None = None
    """The type of 16 bits to which those of them that are plain numbers are rounded; None: kept as they are stored."""

    @cached_property
    def _weights(self) -> RankWeights:
        return RankWeights(self.checkpoint, self.plan, self.model.family)

    def fill(self, recurrence: Recurrence | None) -> None:
        """Replace every linear layer, and every unfilled parameter by what this rank keeps of it."""
        # The vocabulary first: it is the largest, and while it is packed there is nothing else yet.
        self._fill_vocabulary()
        self._done()
        self._fill_layers_table()
        for group in list(self._linear_groups()):
            self._fill_group(group)
            self._done()
        for name, module in list(self.model.modules()):
            if are_experts(name):
                self.model.replace(name, self._packed_experts(name, module))
                self._done()
        for name, module in list(self.model.modules()):
            for leaf, place in list(module.numbers()):
                if isinstance(place, Unfilled):
                    setattr(module, leaf, joined([self._weights.read(name, leaf, place.shape)]))
        if recurrence is not None:
            recurrent.install(self.model, recurrence, self.plan)
        self.model.offset_norms()

    def _done(self) -> None:
        """Release the pages of tensors that are packed or copied."""
        self.checkpoint.release()
        self.tell(self.checkpoint.read_share)

    def _linear_groups(self) -> Iterator[LinearGroup]:
        """Every linear layer but those that stay as they are, once."""
        for path, parent in self.model.modules():
            linears = {name: part for name, part in parent.parts() if isinstance(part, Linear)}
            forms = {name: (one.weight.shape[1], one.bias is not None) for name, one in linears.items()}
            yield from groups_of(path, forms)

    def _fill_group(self, group: LinearGroup) -> None:
        """Put one product where the group's layers were, under their joined names."""
        names, parent = group.full_names(), self.model.at(group.parent)
        linears: list[Linear] = [getattr(parent, name) for name in group.names]
        weights = [
            self._converted(f"{name}.weight", self._weights.read(name, "weight", linear.weight.shape))
            for name, linear in zip(names, linears, strict=True)
        ]
        bias = None
        if linears[0].bias is not None:
            shapes = [one.bias.shape for one in linears if one.bias is not None]
            bias = joined([self._weights.read(name, "bias", shape) for name, shape in zip(names, shapes, strict=True)])
        summed = self.plan.role(names[0]) == "rowwise"
        if summed and self.plan.rank:  # the ranks' outputs are summed: one of them adds the bias
            bias = None
        packed = self._packed(weights, bias)
        packed.summed = summed
        for name in group.names:
            delattr(parent, name)
        setattr(parent, "_".join(group.names), packed)

    def _packed_experts(self, name: str, experts: Any) -> PackedExperts:
        """Each expert read and packed by itself."""
        layers: dict[str, list[PackedLinear]] = {GATE_UP: [], DOWN: []}
        sizes, read = sizes_of(experts), self._weights
        for leaf, packed in layers.items():
            for number in range(getattr(experts, leaf).shape[0]):
                parts = read.expert(name, leaf, sizes, number)
                bias = joined(read.expert_biases(name, leaf, sizes, number)) if have_biases(experts) else None
                packed.append(self._packed([self._converted(stored, part) for stored, part in parts], bias))
        return PackedExperts(layers[GATE_UP], layers[DOWN], summed=self.plan.role(name) == "experts")

    def _fill_vocabulary(self) -> None:
        model = self.model
        embedding: Any = model.model.embed_tokens
        head: Any = model.lm_head
        shape, tied = embedding.weight.shape, bool(model.config.tie_word_embeddings)
        table = self._vocabulary("model.embed_tokens.weight", shape)
        bias = None
        if head.bias is not None:
            bias = joined([self._weights.vocabulary("lm_head.bias", head.weight.shape)])
        rounds_tables = self.quant == "int8"  # a scaled embedding's rounding would be scaled too
        if tied and not (rounds_tables and embedding.scale is not None):
            model.lm_head = self._packed([table], bias)
            looked_up = PackedEmbedding(model.lm_head, embedding.scale)
        else:
            scores = table if tied else self._vocabulary("lm_head.weight", head.weight.shape)
            model.lm_head = self._packed([scores], bias)
            looked_up = self._embedding(table, embedding.scale)
        model.model.embed_tokens = self._of_all_ranks(looked_up, shape[0], table.shape[0])

    def _fill_layers_table(self) -> None:
        """The embedding that gives each layer an input of its own. It is larger than that of the tokens, so each rank
        keeps its rows, in blocks if these were asked for, else in the 16 bits in which they are stored."""
        body = self.model.model
        table: Any = getattr(body, LAYERS_TABLE, None)
        if table is None:
            return
        rows = self._vocabulary(f"model.{LAYERS_TABLE}.weight", table.weight.shape)
        looked_up = self._embedding(rows, table.scale)
        setattr(body, LAYERS_TABLE, self._of_all_ranks(looked_up, table.weight.shape[0], rows.shape[0]))
        self._done()

    def _embedding(self, table: Any, scale: float | None) -> Embedding | PackedEmbedding:
        """Of a table apart from the head: in blocks, in 16 bits where it is stored so or layers are quantized, or in
        float32."""
        if isinstance(table, StoredMatrix):
            return PackedEmbedding(self._packed([table], None), scale)
        if table.dtype.name in HALVES:
            return Embedding(self._copied(table, table.dtype), scale)
        kind = np.float32 if self.quant is None else np.float16
        return Embedding(self._copied(table, np.dtype(kind)), scale)

    def _copied(self, table: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.array(table, dtype)

    def _of_all_ranks(self, rows: Embedding | PackedEmbedding, whole: int, here: int) -> Module:
        """The look-up of a table of `whole` rows, `here` of them on this rank."""
        if self.plan.world_size == 1:
            return rows
        return SplitEmbedding(rows, self._weights.first_row(whole), here, self.link)

    def _vocabulary(self, name: str, shape: tuple[int, ...]) -> Any:
        rows = self._weights.vocabulary(name, shape)
        return rows if isinstance(rows, StoredMatrix) else self._converted(name, rows)

    def _converted(self, name: str, weights: Any) -> Any:
        """The matrix `name` of a linear layer or of the vocabulary, in blocks or rounded if that was asked for."""
        if self.quantizer is not None:
            return self.quantizer.blocks(name, weights)
        return self._rounded(weights)

    def _rounded(self, weights: Any) -> Any:
        return rounded(weights, self.storage)

    def _packed(self, weights: list[Any], bias: NDArray[Any] | None) -> PackedLinear:
        return self._linear(weights, bias, [kept_as(part, self.quant) for part in weights])

    def _linear(self, parts: list[Any], bias: NDArray[Any] | None, kinds: list[str]) -> PackedLinear:
        return PackedLinear(parts, bias, kinds, self.threads)


def joined(parts: list[NDArray[Any]]) -> NDArray[np.float32]:
    """The parts one under the other in float32, always as a copy: they may be views of the mapped file."""
    return np.concatenate(parts, dtype=np.float32, casting="unsafe") if len(parts) > 1 else parts[0].astype(np.float32)
