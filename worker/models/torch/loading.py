"""Builds one rank's shard of a model that torch computes: on GPUs, in float64, encoders, and what C++ does not compute;
and the parts of other models that torch has: towers of images, poolers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from control.quantization import BLOCK_QUANTS
from worker.kv.base import CacheLayout, WholeLayout
from worker.models.served import ServedModel
from worker.models.shard import Shard
from worker.models.torch.layers import Packing, fuse_norms, packing
from worker.models.torch.meta_model import CHUNKED, GROWTH, WINDOW
from worker.models.torch.pooled import Pooler, label_head, load_encoder, load_pooler, show_hidden_states
from worker.models.torch.recurrent import install
from worker.models.torch.served import TorchModel
from worker.models.torch.weight_loader import WeightLoader
from worker.repository import multimodal, validation
from worker.repository.multimodal import part_of
from worker.repository.pooling import Pooling, is_encoder, is_in_one_row, pooling_of
from worker.selftest.shapes import Shapes
from worker.tensors import torch_type
from worker.weights.checkpoint import Checkpoint
from worker.weights.quantizer import Quantizer
from worker.weights.safetensors_header import image_tensors

if TYPE_CHECKING:
    from worker.models.torch.vision import VisionTower  # it imports transformers


def load(shard: Shard, stored: np.dtype[Any], kinds: Iterable[str] | None, shapes: Shapes | None) -> ServedModel:
    """The shard, ready to serve. `stored`: the type in which its matrices are to be kept. `kinds`, `shapes`: as in
    `packing`. Raises ModelFilesError or SettingsError."""
    config = shard.files.config
    where = torch.device(shard.device)
    pooling = pooling_of(config)
    if pooling is not None and is_encoder(config):
        return load_encoder(shard.files, pooling, shard.link.collective, torch_type(stored), where, shard.tell)
    from worker.models.torch.meta_model import configuration, meta_model  # only here: encoders do without transformers

    one = _Load(
        shard, torch_type(shard.dtype), where, packing(shard.quant, torch_type(shard.dtype), where, kinds, shapes)
    )
    return one.served(one.filled(meta_model(configuration(config), one.dtype, where)))


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
                dtype=self.dtype,
                device=self.device,
                link=shard.link,
                packing=self.packing,
                tell=shard.tell,
                quantizer=quantizer,
                storage=shard.storage,
                grouped=shard.grouped,
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
