"""What a load is asked for, and what follows from it for either forward: the checkpoint, a rank's parts, its cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from worker.collective.link import Link
from worker.families.family import Family
from worker.families.parts import SLIDING
from worker.families.recurrence import LINEAR, Recurrence
from worker.kv.base import CacheLayout, LayerCache, StateLayout
from worker.repository import validation
from worker.repository.files import ModelFiles
from worker.weights.checkpoint import Checkpoint, StoredTensors
from worker.weights.gguf_checkpoint import GgufCheckpoint
from worker.weights.quantized_checkpoint import QuantizedCheckpoint
from worker.weights.safetensors_header import text_tensors
from worker.weights.schemes import scheme_of
from worker.weights.sharding import ShardPlan
from worker.weights.stored_together import StoredAbove, StoredTogether


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model that is to be loaded."""

    files: ModelFiles
    link: Link
    dtype: np.dtype[Any]
    """Of products, activations, keys and values."""
    storage: np.dtype[Any] | None
    """The type of 16 bits to which matrices are rounded; None: kept as they are stored."""
    device: str
    quant: str | None
    dequantize: bool
    tell: Callable[[float], None]

    @property
    def recurrence(self) -> Recurrence | None:
        return validation.recurrence(self.files.config)

    @property
    def grouped(self) -> bool:
        """True if the checkpoint's matrices are read as `StoredMatrix`."""
        return scheme_of(self.files.config) is not None

    def open(self) -> AbstractContextManager[StoredTensors]:
        return open_checkpoint(self.files, self.dequantize)

    def check_read(self, checkpoint: StoredTensors, config: Any) -> None:
        """Raise ModelFilesError naming a tensor of the files that a model of `config` does not have."""
        if not self.grouped and isinstance(checkpoint, Checkpoint):  # else other tensors are read than names say
            # Files may have keys and values of layers that attend to those of earlier ones.
            names = ("k_proj", "v_proj", "k_norm", "v_norm")
            unused = [f"layers.{layer}.self_attn.{name}" for layer in cache_sources(config) for name in names]
            checkpoint.check_read(config.num_hidden_layers, unused)

    def plan(self, config: Any, family: Family, borders: tuple[int, ...] = ()) -> ShardPlan:
        group, recurrent = self.link.collective, self.recurrence
        kv_heads, by_layer = validation.kv_heads(self.files.config), validation.layer_kv_heads(self.files.config)
        regions, groups = (recurrent.regions, recurrent.groups_of_heads) if recurrent else ((), 0)
        return ShardPlan(
            family.roles,
            config.num_attention_heads,
            kv_heads,
            group.rank,
            group.world_size,
            borders,
            by_layer,
            regions,
            groups,
        )

    def cache_layout(self, config: Any, plan: ShardPlan) -> CacheLayout:
        return cache_layout(config, plan, self.dtype, self.device, self.recurrence)


def open_checkpoint(files: ModelFiles, dequantize: bool) -> AbstractContextManager[StoredTensors]:
    """The tensors of a model's files, plain or quantized; `dequantize` makes plain numbers of GGUF blocks."""
    if files.gguf is not None:
        return GgufCheckpoint(files.gguf, dequantize)
    scheme, experts = scheme_of(files.config), validation.family_of(files.config).experts
    tensors = text_tensors(files.tensors)
    if experts is not None and experts.together:
        return StoredTogether(tensors)
    if experts is not None and experts.stored_above is not None and scheme is None:
        return StoredAbove(tensors, experts.stored_above)
    return Checkpoint(tensors) if scheme is None else QuantizedCheckpoint(tensors, scheme)


def cache_layout(
    config: Any, plan: ShardPlan, dtype: np.dtype[Any], device: str, recurrent: Recurrence | None = None
) -> CacheLayout:
    """The cache of a model with this configuration: native_config's, or transformers'."""
    by_config = getattr(config, "layer_types", None) if recurrent is None else recurrent.kinds
    kinds = by_config or [SLIDING] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    by_layer = config.per_layer_config if getattr(config, "is_heterogeneous", False) else None
    sources = cache_sources(config)

    def cache(layer: int) -> LayerCache:
        seen = window if kinds[layer] == SLIDING else None
        heads = plan.layer_kv_heads[layer] if plan.layer_kv_heads else plan.kv_heads
        own = config if by_layer is None else by_layer[layer]
        head_dim = getattr(own, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return LayerCache(plan.kv_heads_here(heads), head_dim, seen, sources.get(layer))

    caches = tuple(cache(layer) for layer, kind in enumerate(kinds) if kind != LINEAR)
    state = None if recurrent is None else state_layout(recurrent, plan.world_size)
    return CacheLayout(caches, dtype, device, state)


def cache_sources(config: Any) -> dict[int, int]:
    """Of a layer that attends to the keys and values of an earlier one, the number of that layer: the last one of its
    kind that has its own."""
    modes: list[str | None] = getattr(config, "kv_sharing_modes", None) or []
    stored = {config.layer_types[layer]: layer for layer, mode in enumerate(modes) if mode == "store"}
    return {layer: stored[config.layer_types[layer]] for layer, mode in enumerate(modes) if mode == "reuse"}


def state_layout(recurrent: Recurrence, ranks: int) -> StateLayout:
    """The state of a sequence on one of `ranks` ranks."""
    heads, key_dim, value_dim = recurrent.matrices
    return StateLayout(
        layers=recurrent.layers,
        window=recurrent.taps - 1,
        channels=recurrent.channels(ranks),
        heads=heads // ranks,
        key_dim=key_dim,
        value_dim=value_dim,
    )
