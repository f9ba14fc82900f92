"""Builds one rank's shard of a model, each parameter read only as far as it is kept.

transformers is imported only for a model whose modules it has to make: the import takes seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch

from control.errors import SettingsError
from control.quantization import BLOCK_QUANTS, check_quant
from worker.collective import Collective
from worker.collective.link import Link
from worker.families.family import Family
from worker.families.parts import SLIDING
from worker.families.recurrence import LINEAR, Recurrence
from worker.kv.base import CacheLayout, LayerCache
from worker.kv.whole import WholeLayout
from worker.models.layers.norms import fuse_norms
from worker.models.layers.packing import Packing, packing
from worker.models.native.config import native_config
from worker.models.native.modules import CausalModel, native_meta_model
from worker.models.native.unsupported import NotNative
from worker.models.pooled.loading import label_head, load_encoder, load_pooler, show_hidden_states
from worker.models.recurrent import install
from worker.models.served import ServedModel
from worker.models.weight_loader import WeightLoader
from worker.native.host import unavailable
from worker.native.library import KindMissing
from worker.repository import quantized, validation
from worker.repository.files import ModelFiles, inspect
from worker.repository.fingerprint import fingerprint
from worker.repository.kinds import kinds_of
from worker.repository.multimodal import tower_tensors
from worker.repository.multimodal.image_part import part_of
from worker.repository.pooling.description import pooling_of
from worker.repository.pooling.gate import is_encoder, is_whole
from worker.selftest.shapes import of_config
from worker.weights.cache import WeightCache, subject_of
from worker.weights.checkpoint import Checkpoint, StoredTensors
from worker.weights.gguf_checkpoint import GgufCheckpoint
from worker.weights.quantized_checkpoint import QuantizedCheckpoint
from worker.weights.quantizer import Quantizer
from worker.weights.safetensors_header import image_tensors, text_tensors
from worker.weights.schemes import scheme_of
from worker.weights.sharding import ShardPlan
from worker.weights.stored_together import StoredAbove, StoredTogether

if TYPE_CHECKING:
    from worker.models.vision.tower import VisionTower  # it imports transformers

log = structlog.get_logger()

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


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
    where = torch.device(device)
    stored = resolve_dtype(dtype, where, files.config)
    pooling = pooling_of(files.config)
    if pooling is not None and is_encoder(files.config):
        return load_encoder(files, pooling, collective, stored, where, tell)
    chosen = computed_in(stored, where)
    storage = None if stored == chosen else stored
    kinds = None if every_kind else kinds_of(files, quant, dequantize, dtype)
    kept = packing(quant, chosen, where, kinds, of_config(files.config, dtype, collective.world_size))
    one = _Load(files, Link(collective), chosen, storage, where, quant, dequantize, kept, tell)
    possible = kept.threads is not None and (pooling is None or not is_whole(files.config, pooling))
    if possible and (native := _native_meta_model(files.config, collective.world_size)) is not None:
        served = one.cached(native, cache if pooling is None else None)
        if served.is_native:
            return served
        log.warning("loading again with transformers", action="load_again")
    from worker.models.meta_model import configuration, meta_model  # only here: it imports transformers

    return one.served(one.filled(meta_model(configuration(files.config), chosen, where))[0])


@dataclass(frozen=True)
class _Load:
    """One load: what was asked for, and what follows from it."""

    files: ModelFiles
    link: Link
    dtype: torch.dtype
    storage: torch.dtype | None
    """The type of 16 bits to which matrices are rounded; None: kept as they are stored."""
    device: torch.device
    quant: str | None
    dequantize: bool
    packing: Packing
    tell: Callable[[float], None]

    def cached(self, model: CausalModel, cache: WeightCache | None) -> ServedModel:
        """`model`, a meta model whose forward is C++, as it was kept in `cache`, else filled from the checkpoint and
        kept there."""
        threads, group = self.packing.threads, self.link.collective
        if cache is None or not cache.on or threads is None:
            return self.served(self.filled(model)[0])
        made_of = fingerprint(self.files, str(self.storage or self.dtype), self.quant, self.dequantize)
        subject = subject_of(self.files.weights, made_of, self.quant, group.rank, group.world_size, threads)
        found: tuple[CausalModel, Quantizer | None] | None = cache.read(subject, threads, self.link, self.tell)
        if found is not None:
            if found[1] is not None:
                found[1].report()
            return self.served(found[0])
        filled = self.filled(model)
        served = self.served(filled[0])
        if served.is_native:
            cache.keep(subject, self.files.weights, filled)
        return served

    def filled(self, model: Any) -> tuple[Any, Quantizer | None]:
        """`model`, a meta model, with this rank's weights, and the quantizer that made blocks of them."""
        threads = self.packing.threads
        quantizer = Quantizer(self.quant, threads) if self.quant in BLOCK_QUANTS and threads is not None else None
        grouped = scheme_of(self.files.config) is not None
        with open_checkpoint(self.files, self.dequantize) as checkpoint:
            plan = self._plan(model, checkpoint.borders if quantizer is None else quantizer.borders)
            WeightLoader(
                model=model,
                checkpoint=checkpoint,
                plan=plan,
                family=self._family(model),
                dtype=self.dtype,
                device=self.device,
                link=self.link,
                packing=self.packing,
                tell=self.tell,
                quantizer=quantizer,
                storage=self.storage,
                grouped=grouped,
            ).fill()
            if not grouped and isinstance(checkpoint, Checkpoint):  # else other tensors are read than names say
                # Files may have keys and values of layers that attend to those of earlier ones.
                names = ("k_proj", "v_proj", "k_norm", "v_norm")
                unused = [f"layers.{layer}.self_attn.{name}" for layer in _sources(model.config) for name in names]
                checkpoint.check_read(model.config.num_hidden_layers, unused)
        if quantizer is not None:
            quantizer.report()
        if (recurrent := validation.recurrence(self.files.config)) is not None:
            install.install(model, recurrent, self.link)
        _fuse(model, self.dtype, self.device)
        return model, quantizer

    def served(self, model: Any) -> ServedModel:
        config, pooling = self.files.config, pooling_of(self.files.config)
        recurrent = validation.recurrence(config)
        layout = _cache_layout(model.config, self._plan(model), self.dtype, self.device, recurrent)
        if pooling is None:
            tower = self._tower(model)
            return ServedModel(model, self.link, layout, model.config.vocab_size, tower=tower)
        show_hidden_states(model, self.dtype, self.device)
        whole = WholeLayout(not config.get("use_bidirectional_attention"), self.dtype, self.device)
        head = label_head(self.files, pooling, self.dtype, self.device)
        pooler = load_pooler(pooling, self.dtype, self.device, head)
        places = whole if is_whole(config, pooling) else layout
        return ServedModel(model, self.link, places, model.config.vocab_size, pooler)

    def _tower(self, model: Any) -> VisionTower | None:
        """The image part, where there is one; on CPUs only."""
        part = part_of(self.files.config) if self.device.type == "cpu" else None
        if part is None:
            return None
        from worker.models.vision.loading import load_tower  # only here: it imports transformers

        tower_tensors.check(self.files.config, self.files.tensors)
        with Checkpoint(image_tensors(self.files.tensors)) as checkpoint:
            return load_tower(part, checkpoint, self.dtype, model, lambda: self.tell(1.0))

    def _family(self, model: Any) -> Family:
        return model.family if isinstance(model, CausalModel) else validation.family_of(self.files.config)

    def _plan(self, model: Any, borders: tuple[int, ...] = ()) -> ShardPlan:
        group, recurrent = self.link.collective, validation.recurrence(self.files.config)
        kv_heads, by_layer = validation.kv_heads(self.files.config), validation.layer_kv_heads(self.files.config)
        roles, heads = self._family(model).roles, model.config.num_attention_heads
        regions, groups = (recurrent.regions, recurrent.groups_of_heads) if recurrent else ((), 0)
        return ShardPlan(roles, heads, kv_heads, group.rank, group.world_size, borders, by_layer, regions, groups)


def prepare(config: dict[str, Any], dtype: str, device: str) -> None:
    """Import what `load` would, and build the model once without weights. Touches no device."""
    if is_encoder(config):
        return
    where = torch.device("cpu")
    chosen = computed_in(resolve_dtype(dtype, torch.device(device), config), torch.device(device))
    native = device == "cpu" and chosen == torch.float32 and unavailable() is None
    if not native or _native_meta_model(config) is None:
        from worker.models.meta_model import configuration, meta_model  # only here, as in `load`

        meta_model(configuration(config), chosen, where)


def _native_meta_model(config: dict[str, Any], ranks: int = 1) -> CausalModel | None:
    """The meta model of a family whose forward is C++, or None where transformers has to make it."""
    try:
        return native_meta_model(native_config(config, ranks), config)
    except NotNative as reason:
        log.debug("transformers makes the modules", reason=str(reason), action="choose_modules")
        return None


def _fuse(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Replace transformers' modules by faster ones."""
    if isinstance(model, CausalModel):
        model.offset_norms()
    elif dtype == torch.float32 and device.type == "cpu":
        fuse_norms(model)
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from worker.models.kernels.modules import fuse  # only here: on a CPU neither Triton nor its kernels are loaded

        fuse(model)


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


def resolve_dtype(name: str, device: torch.device, config: dict[str, Any] | None = None) -> torch.dtype:
    """`auto` is float32 on a CPU, where 16-bit products are slow, and the checkpoint's own type elsewhere."""
    if name == "auto":
        own = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
        return torch.float32 if device.type == "cpu" else DTYPES.get(str(own), torch.bfloat16)
    if name not in DTYPES:
        raise SettingsError(f"Unknown dtype '{name}'. Use auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def computed_in(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of a model's products, activations, keys and values. On a CPU types of 16 bits are those in which its
    matrices are stored; it computes in float32, or in float64."""
    return torch.float32 if device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) else dtype


def _cache_layout(
    config: Any, plan: ShardPlan, dtype: torch.dtype, device: torch.device, recurrent: Recurrence | None = None
) -> CacheLayout:
    given = getattr(config, "layer_types", None) if recurrent is None else recurrent.kinds
    kinds = given or [SLIDING] * config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    by_layer = config.per_layer_config if getattr(config, "is_heterogeneous", False) else None
    sources = _sources(config)

    def cache(layer: int) -> LayerCache:
        seen = window if kinds[layer] == SLIDING else None
        heads = plan.layer_kv_heads[layer] if plan.layer_kv_heads else plan.kv_heads
        own = config if by_layer is None else by_layer[layer]
        head_dim = getattr(own, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return LayerCache(plan.kv_heads_here(heads), head_dim, seen, sources.get(layer))

    caches = tuple(cache(layer) for layer, kind in enumerate(kinds) if kind != LINEAR)
    return CacheLayout(
        caches, dtype, device, None if recurrent is None else install.state_layout(recurrent, plan.world_size)
    )


def _sources(config: Any) -> dict[int, int]:
    """Of a layer that attends to the keys and values of an earlier one, the number of that layer: the last one of its
    kind that has its own."""
    modes: list[str | None] = getattr(config, "kv_sharing_modes", None) or []
    stored = {config.layer_types[layer]: layer for layer, mode in enumerate(modes) if mode == "store"}
    return {layer: stored[config.layer_types[layer]] for layer, mode in enumerate(modes) if mode == "reuse"}
