"""Builds one rank's shard of a model, each parameter read only as far as it is kept.

A model whose forward is C++ is loaded here, without torch. All others are torch_loading.py's, which is imported for
them alone: torch and transformers take seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog

from control.quantization import BLOCK_QUANTS, check_quant
from worker.collective import Collective
from worker.collective.base import Link
from worker.models.native.config import native_config
from worker.models.native.forward import native_forward
from worker.models.native.linear import PackedLinear
from worker.models.native.loading import NativeLoader
from worker.models.native.module import NotNative, require
from worker.models.native.modules import CausalModel, native_meta_model
from worker.models.served import NativeModel, ServedModel
from worker.models.shard import Shard, computed_in, may_be_native, resolve_dtype
from worker.native.host import unavailable
from worker.native.library import KindMissing, Threads, reason_missing, threads_here
from worker.repository import quantized, torch_part, validation
from worker.repository.files import ModelFiles, inspect
from worker.repository.fingerprint import fingerprint
from worker.repository.kinds import kinds_of
from worker.repository.multimodal.image_part import part_of
from worker.repository.pooling.description import Pooling, pooling_of
from worker.repository.pooling.gate import is_encoder
from worker.selftest.shapes import of_config
from worker.weights.cache import WeightCache, subject_of
from worker.weights.quantizer import Quantizer

if TYPE_CHECKING:
    from worker.models.vision.tower import VisionTower  # it imports torch and transformers

log = structlog.get_logger()


def load(
    source: ModelFiles | Path,
    *,
    collective: Collective,
    dtype: str = "auto",
    quant: str | None = None,
    dequantize: bool = False,
    device: str = "cpu",
    tell: Callable[[float], None] = lambda share: None,
    cache: WeightCache | None = None,
) -> ServedModel:
    """This rank's shard, ready to serve. `tell` is called with the share of the checkpoint that was read. Packed
    weights are read from `cache`, or kept there. Ranks exchange nothing, so each may load at its own speed. Raises
    ModelFilesError, UnsupportedArchitecture or SettingsError."""
    files = source if isinstance(source, ModelFiles) else inspect(source)
    attempt = partial(_load, files, collective, dtype, quant, dequantize, device, tell, cache)
    try:
        return attempt(every_kind=False)
    except KindMissing as missing:
        log.warning("loading again with every kind of weights", reason=str(missing), action="load_again")
        return attempt(every_kind=True)


def _load(
    files: ModelFiles,
    collective: Collective,
    dtype: str,
    quant: str | None,
    dequantize: bool,
    device: str,
    tell: Callable[[float], None],
    cache: WeightCache | None,
    *,
    every_kind: bool,
) -> ServedModel:
    """`every_kind`: with a C++ library for all kinds of weights, not for those alone that the files promise. Raises
    KindMissing without it."""
    validation.check(files.config, collective.world_size, quant=quant)
    check_quant(quant, dtype, [device])
    quantized.check(files.config, files.tensors, collective.world_size, [device])
    validation.check_devices(files.config, [device])
    stored = resolve_dtype(dtype, device, files.config)
    chosen = computed_in(stored, device)
    shard = Shard(
        files=files,
        link=Link(collective),
        dtype=chosen,
        storage=None if stored == chosen else stored,
        device=device,
        quant=quant,
        dequantize=dequantize,
        tell=tell,
    )
    kinds = None if every_kind else kinds_of(files, quant, dequantize, dtype)
    shapes = None if is_encoder(files.config) else of_config(files.config, dtype, collective.world_size)
    if may_be_native(files.config, chosen, device):
        threads = threads_here(kinds, shapes)
        try:
            require(threads is not None, reason_missing())
            model = _meta_model(files.config, collective.world_size)
        except NotNative as reason:
            log.info("torch runs the forward", reason=str(reason), action="choose_forward")
        else:
            assert threads is not None
            served = _native(shard, model, threads, cache)
            if served is not None:
                return served
            log.warning("loading again with transformers", action="load_again")
    torch_part.check("torch computes this model")
    from worker.models import torch_loading  # only here: it imports torch

    return torch_loading.load(shard, stored, kinds, shapes)


def _native(shard: Shard, model: CausalModel, threads: Threads, cache: WeightCache | None) -> ServedModel | None:
    """`model`, a meta model, as it was kept in `cache`, else filled from the checkpoint and kept there. None where its
    forward can't be C++."""
    files, group = shard.files, shard.link.collective
    if cache is None or not cache.on or pooling_of(files.config) is not None:
        return _served(shard, _filled(shard, model, threads)[0], threads)
    made_of = fingerprint(files, (shard.storage or shard.dtype).name, shard.quant, shard.dequantize)
    subject = subject_of(files.weights, made_of, shard.quant, group.rank, group.world_size, threads)
    cached: tuple[CausalModel, Quantizer | None] | None = cache.read(subject, threads, shard.link, shard.tell)
    if cached is not None:
        if cached[1] is not None:
            cached[1].report()
        return _served(shard, cached[0], threads)
    filled = _filled(shard, model, threads)
    served = _served(shard, filled[0], threads)
    if served is not None:
        cache.keep(subject, files.weights, filled)
    return served


def _filled(shard: Shard, model: CausalModel, threads: Threads) -> tuple[CausalModel, Quantizer | None]:
    """`model`, a meta model, with this rank's weights, and the quantizer that made blocks of them."""
    quantizer = Quantizer(shard.quant, threads) if shard.quant in BLOCK_QUANTS else None
    with shard.open() as checkpoint:
        borders = checkpoint.borders if quantizer is None else quantizer.borders
        NativeLoader(
            model=model,
            checkpoint=checkpoint,
            plan=shard.plan(model.config, model.family, borders),
            link=shard.link,
            threads=threads,
            quant=shard.quant,
            tell=shard.tell,
            quantizer=quantizer,
            storage=shard.storage,
        ).fill(shard.recurrence)
        shard.check_read(checkpoint, model.config)
    if quantizer is not None:
        quantizer.report()
    return model, quantizer


def _served(shard: Shard, model: CausalModel, threads: Threads) -> ServedModel | None:
    pooling = pooling_of(shard.files.config)
    layout = shard.cache_layout(model.config, shard.plan(model.config, model.family))
    if pooling is not None:
        return _pooled(shard, model, threads, pooling)
    tower = _tower(shard, model)
    axes = None if tower is None or tower.axes is None else np.asarray(tower.axes)
    forward = native_forward(model, shard.link, layout, model.config.vocab_size, axes)
    if forward is None:
        return None
    return NativeModel(model, forward, shard.link, layout, model.config.vocab_size, tower=tower)


def _pooled(shard: Shard, model: CausalModel, threads: Threads, pooling: Pooling) -> ServedModel | None:
    """A model whose hidden states make a vector or a score. Its logits become the hidden states after the last norm:
    its head is the identity, whose products are exact."""
    from worker.models.torch_loading import causal_pooler  # only here: torch pools

    width = model.config.hidden_size
    layout = shard.cache_layout(model.config, shard.plan(model.config, model.family))
    model.lm_head = PackedLinear([np.eye(width, dtype=np.float32)], None, ["float32"], threads)
    forward = native_forward(model, shard.link, layout, width)
    if forward is None:
        return None
    pooler = causal_pooler(shard, pooling)
    return NativeModel(model, forward, shard.link, layout, model.config.vocab_size, pooler=pooler)


def _tower(shard: Shard, model: CausalModel) -> VisionTower | None:
    """The image part, where there is one."""
    if part_of(shard.files.config) is None:
        return None
    from worker.models.torch_loading import tower_of  # only here: the tower is torch's

    return tower_of(shard, model)


def prepare(config: dict[str, Any], dtype: str, device: str) -> None:
    """Import what `load` would, and build the model once without weights. Touches no device."""
    chosen = computed_in(resolve_dtype(dtype, device, config), device)
    native = may_be_native(config, chosen, device) and unavailable() is None
    try:
        require(native, "torch computes it")
        _meta_model(config)
        is_native = True
    except NotNative:
        is_native = False
    if not is_native or pooling_of(config) is not None or part_of(config) is not None:
        from worker.models import torch_loading  # only here: it imports torch

        if not is_native:
            torch_loading.prepare(config, chosen)


def _meta_model(config: dict[str, Any], ranks: int = 1) -> CausalModel:
    """The meta model of a family whose forward is C++. Raises NotNative where transformers has to make it."""
    return native_meta_model(native_config(config, ranks), config)
