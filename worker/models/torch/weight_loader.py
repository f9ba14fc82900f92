"""Weights of a rank in modules of transformers: of each tensor only the kept part is read, then packed and released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from worker.families.family import Family
from worker.models.native.modules import LAYERS_TABLE
from worker.models.shard import RankWeights, are_experts, rounded
from worker.models.torch import layers
from worker.models.torch.layers import (
    DenseLinear,
    HalfEmbedding,
    NativeLinear,
    PackedEmbedding,
    Packing,
    stacked,
    tensor_of,
)
from worker.tensors import torch_type
from worker.weights.checkpoint import StoredTensors
from worker.weights.quantizer import Quantizer
from worker.weights.sharding import ShardPlan
from worker.weights.stored_matrix import StoredMatrix, Weights


@dataclass(frozen=True)
class WeightLoader:
    """Loads a model's weights. `packing` makes the linear layers; `tell` is called with the share that was read."""

    model: Any
    checkpoint: StoredTensors
    plan: ShardPlan
    family: Family
    dtype: torch.dtype
    device: torch.device
    link: layers.Link
    packing: Packing
    tell: Callable[[float], None]
    quantizer: Quantizer | None = None
    """Makes blocks of the weights of linear layers and of the vocabulary."""
    storage: np.dtype[Any] | None = None
    """The type of 16 bits to which those of them that are plain numbers are rounded; None: kept as they are stored."""
    grouped: bool = False
    """True if the checkpoint's matrices are read as `StoredMatrix`."""

    @cached_property
    def _weights(self) -> RankWeights:
        return RankWeights(self.checkpoint, self.plan, self.family)

    def fill(self) -> None:
        """Replace every linear layer, and every other meta parameter by what this rank keeps of it."""
        # The vocabulary first: it is the largest, and while it is packed there is nothing else yet.
        self._fill_vocabulary()
        self._done()
        self._fill_embedding_table()
        for group in list(layers.linear_groups(self.model, self.model.get_output_embeddings())):
            self._fill_group(group)
            self._done()
        self._fill_experts()
        for name, module in list(self.model.named_modules()):
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                if parameter.is_meta:
                    module._parameters[leaf] = self._parameter(self._read(name, leaf, parameter))
            for leaf, buffer in list(module.named_buffers(recurse=False)):
                if leaf not in module._non_persistent_buffers_set:
                    buffer.copy_(self._read(name, leaf, buffer))
        layers.sparse_gates(self.model, self.link)
        if self.plan.world_size > 1:
            layers.split_vocabulary(self.model, self.plan, self.link)
            layers.split_layers(self.model, self.plan, self.link)

    def _done(self) -> None:
        """Release the pages of tensors that are packed or copied."""
        self.checkpoint.release()
        self.tell(self.checkpoint.read_share)

    def _fill_group(self, group: layers.LinearGroup) -> None:
        names = group.full_names()
        linears = [self.model.get_submodule(name) for name in names]
        weights = [
            self._converted(f"{name}.weight", self._weights.read(name, "weight", tuple(linear.weight.shape)))
            for name, linear in zip(names, linears, strict=True)
        ]
        bias = None
        if linears[0].bias is not None:
            parts = [self._read(name, "bias", linear.bias) for name, linear in zip(names, linears, strict=True)]
            bias = stacked(parts, self.dtype, self.device)
        widths = [weight.shape[0] for weight in weights]
        if self.plan.role(names[0]) == "rowwise":
            layers.install_group(
                self.model, group, layers.RowParallelLinear(self.packing.pack(weights, None), bias, self.link), widths
            )
        else:
            layers.install_group(self.model, group, self.packing.pack(weights, bias), widths)

    def _fill_experts(self) -> None:
        """Pack each expert's layers, where layers are packed or stored otherwise than in plain numbers."""
        mixture = self.family.experts
        if mixture is None or not (self.packing.packed or self.grouped):
            return
        for name, module in list(self.model.named_modules()):
            if are_experts(name):
                packed = layers.packed_experts(self._weights, name, module, self._converted, self.packing.pack)
                self.model.set_submodule(name, packed)
                self._done()

    def _fill_vocabulary(self) -> None:
        model = self.model
        tied = bool(self.model.config.tie_word_embeddings)
        embedding = model.get_input_embeddings()
        head = model.get_output_embeddings()
        name_of = {module: name for name, module in model.named_modules()}
        table = self._vocabulary(f"{name_of[embedding]}.weight", embedding)
        apart = self.packing.keeps_stored_rows(table)
        bias = None
        if head.bias is not None:
            rows = self._weights.vocabulary(f"{name_of[head]}.bias", tuple(head.weight.shape))
            bias = stacked([tensor_of(rows)], self.dtype, self.device)
        if (
            tied
            and self.packing.shares_tables
            and not (self.packing.rounds_tables and hasattr(embedding, "embed_scale"))
        ):
            head = cast(NativeLinear, self.packing.pack([table], bias))  # the only layer that shares tables
            model.set_output_embeddings(head)
            model.set_input_embeddings(PackedEmbedding(head, embedding))
            return
        if tied and not apart and isinstance(table, Tensor):
            embedding.weight = self._parameter(table)
            model.set_output_embeddings(DenseLinear(embedding.weight, bias))
            return
        scores = table
        if not tied:
            scores = self._vocabulary(f"{name_of[head]}.weight", head)
        model.set_output_embeddings(self.packing.pack([scores], bias))
        if isinstance(table, StoredMatrix):
            packed = cast(NativeLinear, self.packing.pack([table], None))  # the only layer of blocks
            model.set_input_embeddings(PackedEmbedding(packed, embedding, own=True))
        elif apart:
            model.set_input_embeddings(HalfEmbedding(embedding, table))
        else:
            embedding.weight = self._parameter(table)

    def _fill_embedding_table(self) -> None:
        """The embedding that gives each layer an input of its own. It is larger than that of the tokens, so each rank
        keeps its rows, in blocks if these were asked for, else in the 16 bits in which they are stored where the layers
        are packed."""
        body = self.model.model
        table = getattr(body, LAYERS_TABLE, None)
        if table is None:
            return
        rows = self._vocabulary(f"model.{LAYERS_TABLE}.weight", table)
        start = self._weights.first_row(table.weight.shape[0])
        if isinstance(rows, StoredMatrix):
            packed = cast(NativeLinear, self.packing.pack([rows], None))  # the only layer of blocks
            table = PackedEmbedding(packed, table, own=True)
        elif self.packing.keeps_stored_rows(rows):
            table = HalfEmbedding(table, rows)
        else:
            table.weight = self._parameter(rows)
        if self.plan.world_size > 1:
            table = layers.VocabParallelEmbedding.of(table, start, self.link)
        setattr(body, LAYERS_TABLE, table)
        self._done()

    def _converted(self, name: str, weights: Weights) -> Any:
        """The matrix `name` of a linear layer or of the vocabulary, in blocks or rounded if that was asked for: a
        tensor, or a `StoredMatrix`."""
        if self.quantizer is not None:
            return tensor_of(self.quantizer.blocks(name, weights))
        return tensor_of(rounded(weights, self.storage))

    def _read(self, module: str, leaf: str, parameter: Tensor) -> Any:
        """This rank's part of a parameter, as stored: a tensor, or a `StoredMatrix`."""
        if are_experts(module):
            stored = layers.read_experts(self._weights, module, leaf, self.model.get_submodule(module))
            return stored if leaf.endswith("bias") else self._rounded(stored)
        return tensor_of(self._weights.read(module, leaf, tuple(parameter.shape)))

    def _rounded(self, weights: Tensor) -> Tensor:
        if self.storage is None:
            return weights
        storage = torch_type(self.storage)
        numbers = torch.finfo(storage)
        return weights.clamp(numbers.min, numbers.max).to(storage)  # saturates rather than overflows

    def _vocabulary(self, name: str, module: Any) -> Any:
        """The rank's rows as stored, padded with zeros to the width that all ranks share."""
        rows = self._weights.vocabulary(name, tuple(module.weight.shape))
        return rows if isinstance(rows, StoredMatrix) else self._converted(name, rows)

    def _parameter(self, stored: Tensor) -> nn.Parameter:
        return nn.Parameter(stacked([stored], self.dtype, self.device), requires_grad=False)
