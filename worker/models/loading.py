"""Builds one rank's shard of a model: transformers' modelling code, each parameter read only as far as it is kept."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from control.errors import SettingsError
from control.quantization import check_quant
from worker.collective import Collective
from worker.kv.base import CacheLayout
from worker.layers import parallel
from worker.layers.norms import fuse_norms
from worker.layers.packing import packing
from worker.layers.sharding import ShardPlan
from worker.models.checkpoint import Checkpoint
from worker.models.meta_model import configuration, meta_model
from worker.models.served import ServedModel
from worker.models.weight_loader import WeightLoader
from worker.repository import validation
from worker.repository.files import ModelFiles, inspect

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def load(
    source: ModelFiles | Path,
    *,
    collective: Collective,
    dtype: str = "auto",
    quant: str | None = None,
    device: str = "cpu",
    tell: Callable[[float], None] = lambda share: None,
) -> ServedModel:
    """This rank's shard, ready to serve. `tell` is called with the share of the checkpoint that was read. Ranks
    exchange nothing, so each may load at its own speed. Raises ModelFilesError, UnsupportedArchitecture or
    SettingsError."""
    files = source if isinstance(source, ModelFiles) else inspect(source)
    validation.check(files.config, collective.world_size, quant=quant)
    check_quant(quant, dtype, [device])
    config = configuration(files.config)
    where = torch.device(device)
    chosen = resolve_dtype(dtype, where, config)
    model = meta_model(config, chosen, where)
    plan = ShardPlan.of_config(config, validation.kv_heads(files.config), collective.rank, collective.world_size)
    link = parallel.Link(collective)
    with Checkpoint(files.weights) as checkpoint:
        family, kept = validation.family_of(files.config), packing(quant, chosen, where)
        WeightLoader(model, checkpoint, plan, family, chosen, where, link, kept, tell).fill()
    if chosen == torch.float32 and where.type == "cpu":
        fuse_norms(model)
    if where.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from worker.models.kernels import fuse  # only here: on a CPU neither Triton nor its kernels are loaded

        fuse(model)
    return ServedModel(model, link, _cache_layout(config, plan, chosen, where), config.vocab_size)


def resolve_dtype(name: str, device: torch.device, config: Any = None) -> torch.dtype:
    """`auto` is float32 on a CPU, where 16-bit products are slow, and the checkpoint's own type elsewhere."""
    if name == "auto":
        own = getattr(config, "dtype", None)
        return torch.float32 if device.type == "cpu" else own if isinstance(own, torch.dtype) else torch.bfloat16
    if name not in DTYPES:
        raise SettingsError(f"Unknown dtype '{name}'. Use auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def _cache_layout(config: Any, plan: ShardPlan, dtype: torch.dtype, device: torch.device) -> CacheLayout:
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    windows = [window if kinds is None or kinds[layer] == "sliding_attention" else None for layer in range(layers)]
    return CacheLayout(
        layers=layers,
        kv_heads=plan.local_kv_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        windows=tuple(windows),
        dtype=dtype,
        device=device,
    )
