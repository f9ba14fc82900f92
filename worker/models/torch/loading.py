"""Builds one rank's shard of a model that torch computes: on GPUs, in float64, encoders, and what C++ does not compute;
and the parts of other models that torch has: towers of images, poolers.

Of each tensor only the kept part is read, then packed and released.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from control.quantization import BLOCK_QUANTS
from worker.families.family import Family
from worker.kv.base import CacheLayout, WholeLayout
from worker.models.native.modules import LAYERS_TABLE
from worker.models.served import ServedModel
from worker.models.shard import RankWeights, Shard, are_experts, rounded
from worker.models.torch import layers
from worker.models.torch.experts import packed_experts, read_experts, tensor_of
from worker.models.torch.layers import (
    DenseLinear,
    HalfEmbedding,
    NativeLinear,
    PackedEmbedding,
    Packing,
    fuse_norms,
    packing,
    stacked,
)
from worker.models.torch.meta_model import CHUNKED, GROWTH, WINDOW
from worker.models.torch.pooled import Pooler, label_head, load_encoder, load_pooler, show_hidden_states
from worker.models.torch.recurrent import install
from worker.models.torch.served import TorchModel
from worker.repository import multimodal, validation
from worker.repository.multimodal import part_of
from worker.repository.pooling import Pooling, is_encoder, is_in_one_row, pooling_of
from worker.selftest.shapes import Shapes
from worker.tensors import torch_type
from worker.weights.checkpoint import Checkpoint, StoredTensors
from worker.weights.dequantize import dequantize
from worker.weights.quantizer import Quantizer
from worker.weights.safetensors_header import image_tensors
from worker.weights.sharding import ShardPlan
from worker.weights.stored_matrix import StoredMatrix, Weights

if TYPE_CHECKING:
    from worker.models.torch.vision import VisionTower  # it imports transformers


def load(shard: Shard, kinds: Iterable[str] | None, shapes: Shapes | None) -> ServedModel:
    """The shard, ready to serve. `kinds`, `shapes`: as in `packing`. Raises ModelFilesError or SettingsError."""
    config = shard.files.config
    where = torch.device(shard.device)
    pooling = pooling_of(config)
    if pooling is not None and is_encoder(config):
        return load_encoder(shard.files, pooling, shard.link.collective, torch_type(shard.stored), where, shard.tell)
    from worker.models.torch.meta_model import configuration, meta_model  # only here: encoders do without transformers

    loading = _Load(
        shard, torch_type(shard.dtype), where, packing(shard.quant, torch_type(shard.dtype), where, kinds, shapes)
    )
    return loading.served(loading.filled(meta_model(configuration(config), loading.dtype, where)))


def prepare(config: dict[str, Any], dtype: np.dtype[Any]) -> None:
    """Build a model of transformers once without weights, for which its code is imported. Touches no device."""
    if not is_encoder(config):
        from worker.models.torch.meta_model import configuration, meta_model  # only here, as in `load`

        meta_model(configuration(config), torch_type(dtype), torch.device("cpu"))


@dataclass(frozen=True)
class _Load:
    """One load of a model of transformers."""

    shard: Shard
    dtype: torch.dtype
    device: torch.device
    packing: Packing

    def filled(self, model: Any) -> Any:
        """`model`, a meta model, with this rank's weights."""
        shard = self.shard
        threads = self.packing.threads
        family = validation.family_of(shard.files.config)
        quantizer = Quantizer(shard.quant, threads) if shard.quant in BLOCK_QUANTS and threads is not None else None
        with shard.open() as checkpoint:
            WeightLoader(
                model=model,
                checkpoint=checkpoint,
                plan=shard.plan(model.config, family, checkpoint.borders if quantizer is None else quantizer.borders),
                family=family,
                shard=shard,
                dtype=self.dtype,
                device=self.device,
                packing=self.packing,
                quantizer=quantizer,
            ).fill()
            shard.check_read(checkpoint, model.config)
        if quantizer is not None:
            quantizer.report()
        if (recurrent := shard.recurrence) is not None:
            install(model, recurrent, shard.link)
        _fuse(model, self.dtype, self.device)
        return model

    def served(self, model: Any) -> ServedModel:
        config = self.shard.files.config
        shard = self.shard
        pooling = pooling_of(config)
        layout = shard.cache_layout(model.config, shard.plan(model.config, validation.family_of(config)))
        if shard.recurrence is None:
            _tell_windows(model, layout)
        _tell_growth(model)
        if pooling is None:
            tower = tower_of(shard, model) if self.device.type == "cpu" and part_of(config) is not None else None
            return TorchModel(model, shard.link, layout, model.config.vocab_size, tower=tower)
        show_hidden_states(model, self.dtype, self.device)
        whole = WholeLayout(not config.get("use_bidirectional_attention"), shard.dtype, shard.device)
        places = whole if is_in_one_row(config, pooling) else layout
        return TorchModel(model, shard.link, places, model.config.vocab_size, causal_pooler(shard, pooling))


def _tell_windows(model: Any, layout: CacheLayout) -> None:
    """Give each layer's attention the width of its window, which some modules don't pass to the attention function."""
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and layer < len(layout.layers):
            setattr(module, WINDOW, layout.layers[layer].window)
            setattr(module, CHUNKED, layout.layers[layer].chunked)


def _tell_growth(model: Any) -> None:
    """Let the attention function scale queries of modules that would count a step's tokens as those of one sequence."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            module.attn_temperature_tuning = False
            if not module.use_rope:
                setattr(module, GROWTH, (module.attn_scale, module.floor_scale, 1.0))


def causal_pooler(shard: Shard, pooling: Pooling) -> Pooler:
    """The pooler, which makes a vector or a score of the hidden states of a causal model."""
    dtype = torch_type(shard.dtype)
    device = torch.device(shard.device)
    return load_pooler(pooling, dtype, device, label_head(shard.files, pooling, dtype, device))


def tower_of(shard: Shard, model: Any) -> VisionTower:
    """The image part of a model, whose text part is `model`. Raises ModelFilesError."""
    from worker.models.torch.vision import load_tower  # only here: it imports transformers

    part = part_of(shard.files.config)
    assert part is not None
    multimodal.check(shard.files.config, shard.files.tensors)
    with Checkpoint(image_tensors(shard.files.tensors)) as checkpoint:
        return load_tower(part, checkpoint, torch_type(shard.dtype), model, lambda: shard.tell(1.0))


def _fuse(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Replace transformers' modules by faster ones."""
    if dtype == torch.float32 and device.type == "cpu":
        fuse_norms(model)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from worker.models.torch.kernels.modules import (
            fuse,  # only here: on a CPU neither Triton nor its kernels are loaded
        )

        fuse(model)


@dataclass(frozen=True)
class WeightLoader:
    """Loads a model's weights. `packing` makes the linear layers; `quantizer` makes blocks of the weights of linear
    layers and of the vocabulary."""

    model: Any
    checkpoint: StoredTensors
    plan: ShardPlan
    family: Family
    shard: Shard
    dtype: torch.dtype
    device: torch.device
    packing: Packing
    quantizer: Quantizer | None

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
        layers.sparse_gates(self.model, self.shard.link)
        if self.plan.world_size > 1:
            layers.split_vocabulary(self.model, self.plan, self.shard.link)
            layers.split_layers(self.model, self.plan, self.shard.link)

    def _done(self) -> None:
        """Release the pages of tensors that are packed or copied."""
        self.checkpoint.release()
        self.shard.tell(self.checkpoint.read_share)

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
                self.model,
                group,
                layers.RowParallelLinear(self.packing.pack(weights, None), bias, self.shard.link),
                widths,
            )
        else:
            layers.install_group(self.model, group, self.packing.pack(weights, bias), widths)

    def _fill_experts(self) -> None:
        """Pack each expert's layers, where layers are packed or stored otherwise than in plain numbers."""
        mixture = self.family.experts
        if mixture is None or not (self.packing.packed or self.shard.grouped):
            return
        for name, module in list(self.model.named_modules()):
            if are_experts(name):
                packed = packed_experts(self._weights, name, module, self._converted, self.packing.pack)
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
            table = layers.VocabParallelEmbedding.of(table, start, self.shard.link)
        setattr(body, LAYERS_TABLE, table)
        self._done()

    def _converted(self, name: str, weights: Weights) -> Any:
        """The matrix `name` of a linear layer or of the vocabulary, in blocks or rounded if that was asked for: a
        tensor, or a `StoredMatrix`."""
        if self.quantizer is not None:
            return tensor_of(self.quantizer.blocks(name, weights))
        return tensor_of(rounded(weights, self.shard.storage))

    def _read(self, module: str, leaf: str, parameter: Tensor) -> Any:
        """This rank's part of a parameter. What is no linear layer here has plain numbers, also of a stored matrix."""
        if are_experts(module):
            stored = read_experts(self._weights, module, leaf, self.model.get_submodule(module))
            return stored if leaf.endswith("bias") else self._rounded(stored)
        stored = self._weights.read(module, leaf, tuple(parameter.shape))
        if isinstance(stored, StoredMatrix):
            wide = np.float64 if self.dtype == torch.float64 else np.float32
            stored = dequantize(stored) if stored.in_blocks else stored.dequantized(wide)
        return tensor_of(stored)

    def _rounded(self, weights: Tensor) -> Tensor:
        if self.shard.storage is None:
            return weights
        storage = torch_type(self.shard.storage)
        numbers = torch.finfo(storage)
        return weights.clamp(numbers.min, numbers.max).to(storage)  # saturates rather than overflows

    def _vocabulary(self, name: str, module: Any) -> Any:
        """The rank's rows as stored, padded with zeros to the width that all ranks share."""
        rows = self._weights.vocabulary(name, tuple(module.weight.shape))
        return rows if isinstance(rows, StoredMatrix) else self._converted(name, rows)

    def _parameter(self, stored: Tensor) -> nn.Parameter:
        return nn.Parameter(stacked([stored], self.dtype, self.device), requires_grad=False)
