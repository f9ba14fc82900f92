"""One rank's shard of a model, for either forward: what was asked for, the checkpoint, the rank's part of each tensor,
the linear layers that are computed as one product, and the cache; no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes  # noqa: F401  # numpy then knows bfloat16 by its name
import numpy as np

from control.errors import SettingsError
from worker.collective.base import Link
from worker.families.family import Family
from worker.families.parts import CHUNKED, SLIDING
from worker.families.recurrence import Recurrence, attends
from worker.kv.base import STORED_TYPES, CacheLayout, LayerCache, StateLayout
from worker.native.host import thread_count
from worker.repository import validation
from worker.repository.files import ModelFiles
from worker.repository.pooling import is_encoder, is_in_one_row, pooling_of
from worker.weights.checkpoint import Checkpoint, StoredTensors, checked
from worker.weights.gguf_checkpoint import GgufCheckpoint
from worker.weights.quantized_checkpoint import QuantizedCheckpoint
from worker.weights.safetensors_header import text_tensors
from worker.weights.schemes import scheme_of
from worker.weights.sharding import OUTPUTS, ShardPlan, padded_share
from worker.weights.stored_matrix import StoredMatrix
from worker.weights.stored_together import StoredAbove, StoredTogether

SIBLINGS = (
    ("q_proj", "k_proj", "v_proj", "g_proj"),
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "k_proj"),  # where the values are the keys
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)

UNPACKED = {
    *("mlp.shared_expert_gate", "router.proj", "gate.wg", "mlp.router", "feed_forward.router"),
    *("altup.correction_coefs", "altup.prediction_coefs", "altup.modality_router"),
}
"""Layers that stay as they are: with few outputs, or whose scores choose experts."""


@dataclass(frozen=True)
class LinearGroup:
    """Linear layers `names` of the module `parent` (dotted): one, or several that always get the same input."""

    parent: str
    names: tuple[str, ...]

    def full_names(self) -> list[str]:
        return [f"{self.parent}.{name}" for name in self.names]


def groups_of(parent: str, linears: Mapping[str, tuple[int, bool]]) -> Iterator[LinearGroup]:
    """The groups of the linear layers of one module, but for those of UNPACKED. `linears`: by name their number of
    inputs, and whether they have a bias: siblings are joined where both are equal."""
    alone = dict(linears)
    for names in SIBLINGS:
        forms = [alone[name] for name in names if name in alone]
        if len(forms) == len(names) and len(set(forms)) == 1:
            yield LinearGroup(parent, names)
            for name in names:
                del alone[name]
    for name in alone:
        if f"{parent.rpartition('.')[2]}.{name}" not in UNPACKED:
            yield LinearGroup(parent, (name,))


GATE_UP = "gate_up_proj"
UP = "up_proj"
DOWN = "down_proj"


@dataclass(frozen=True)
class RankWeights:
    """Reads by the names of transformers' modules. What is read is as stored: arrays, or `StoredMatrix`; both may be
    views of the mapped file."""

    checkpoint: StoredTensors
    plan: ShardPlan
    family: Family

    def read(self, module: str, leaf: str, shape: tuple[int, ...]) -> Any:
        """The part of a parameter that has `shape` on all ranks together."""
        name = f"{module}.{leaf}"
        stored = self._stored(name)
        # A parameter that is no module's has a role by its own name.
        sharded = module if self.plan.role(module) is not None else name
        role = self.plan.role(sharded)
        sizes = list(shape)
        dim = 0 if role in OUTPUTS else 1 if role == "rowwise" and leaf == "weight" else None
        if dim is None:
            return checked(stored, self.checkpoint.read(stored), sizes)
        intervals = self.plan.intervals(sharded, sizes[dim])
        sizes[dim] = sum(stop - start for start, stop in intervals)
        return checked(stored, self.checkpoint.read(stored, dim, intervals), sizes)

    def _stored(self, name: str) -> str:
        """The name that files have for a parameter."""
        for ours, theirs in self.family.stored_names:
            name = name.replace(ours, theirs)
        return name

    def vocabulary(self, name: str, shape: tuple[int, ...]) -> Any:
        """The rows of a vocabulary's tensor, whose `shape` is that of all ranks together, padded with zeros to the
        number that all ranks share. A bias has the shape of its weights here."""
        name = self._stored(name)
        start, stop, width = padded_share(shape[0], self.plan.rank, self.plan.world_size)
        whole = self.plan.world_size == 1
        rows = self.checkpoint.read(name) if whole else self.checkpoint.read(name, 0, [(start, stop)])
        checked(name, rows, [stop - start, *shape[1 : len(rows.shape)]])
        if isinstance(rows, StoredMatrix):
            return rows.padded(width)
        if missing := width - rows.shape[0]:
            return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])
        return rows

    def first_row(self, rows: int) -> int:
        """The first of this rank's rows of a vocabulary."""
        return padded_share(rows, self.plan.rank, self.plan.world_size)[0]

    def expert(self, module: str, leaf: str, sizes: tuple[int, int], number: int) -> list[tuple[str, Any]]:
        """The matrices of one expert of the module `module`, gate and up, or down, with the names of the tensors.
        `sizes`: (hidden, inner width) of the whole model. The inner width is split, with the same columns of gate and
        up and rows of down on one rank."""
        hidden, width = sizes
        start, stop = self.plan.feed_forward_share(width)
        gate, up, down = self._names(module, number)
        if leaf == DOWN:
            return [(down, checked(down, self.checkpoint.read(down, 1, [(start, stop)]), [hidden, stop - start]))]
        shape = [stop - start, hidden]
        keys = [key for key in (gate, up) if key]
        return [(key, checked(key, self.checkpoint.read(key, 0, [(start, stop)]), shape)) for key in keys]

    def expert_biases(self, module: str, leaf: str, sizes: tuple[int, int], number: int) -> list[Any]:
        """The biases of one expert: of gate and up, or of down."""
        hidden, width = sizes
        start, stop = self.plan.feed_forward_share(width)
        gate, up, down = (key.removesuffix("weight") + "bias" for key in self._names(module, number))
        if leaf == DOWN:
            bias = checked(down, self.checkpoint.read(down), [hidden])
            # The ranks' outputs are summed: one of them adds the bias.
            return [bias if self.plan.rank == 0 else np.zeros_like(bias)]
        return [checked(key, self.checkpoint.read(key, 0, [(start, stop)]), [stop - start]) for key in (gate, up)]

    def _names(self, module: str, number: int) -> list[str]:
        layer = re.match(r".*\blayers\.\d+\.", module)
        assert layer is not None and self.family.experts is not None
        return [key and layer[0] + key.format(number) for key in self.family.experts.tensors]


def are_experts(module: str) -> bool:
    """True if a module of the meta model holds the experts of a layer."""
    return module.endswith(".experts")


def first_leaf(experts: Any) -> str:
    """The parameter of the experts' first layer: gate and up, or up alone where they have no gate."""
    return GATE_UP if hasattr(experts, GATE_UP) else UP


def have_biases(experts: Any) -> bool:
    """True for experts of gpt_oss. transformers keeps their matrices with the inputs first, gate and up in turn."""
    return hasattr(experts, f"{GATE_UP}_bias")


def have_inputs_first(experts: Any, family: Family) -> bool:
    """True for a module whose matrices have inputs before outputs."""
    return have_biases(experts) or (family.experts is not None and family.experts.inputs_first)


def sizes_of(experts: Any, family: Family) -> tuple[int, int]:
    """(hidden, inner width) of each expert of the whole model."""
    _, first, second = experts.down_proj.shape
    return (second, first) if have_inputs_first(experts, family) else (first, second)


def rounded(weights: Any, storage: np.dtype[Any] | None) -> Any:
    """Plain numbers in the type of 16 bits `storage`, saturated rather than infinite; others stay what they are."""
    if storage is None or isinstance(weights, StoredMatrix):
        return weights
    most = LARGEST[storage.name]
    rows = np.atleast_1d(weights)
    result = np.empty(rows.shape, storage)

    def fill(first: int) -> None:
        part = rows[first : first + step]
        wide = part if part.dtype.itemsize >= 4 else part.astype(np.float32)
        result[first : first + step] = np.clip(wide, -most, most)

    # Blocks that stay in the processor's caches, in threads: numpy needs no lock of Python's for them.
    step = max(1, _BLOCK * len(rows) // max(1, rows.size))
    with ThreadPoolExecutor(thread_count()) as threads:
        list(threads.map(fill, range(0, len(rows), step)))
    return result.reshape(weights.shape)


_BLOCK = 1 << 18
"""Numbers that a thread rounds at a time."""

LARGEST = {"float16": 65504.0, "bfloat16": (2 - 2**-7) * 2.0**127}
"""Of each type of 16 bits the largest number."""


DTYPES = {name: np.dtype(name) for name in ("float64", "float32", "bfloat16", "float16")}
HALVES = ("bfloat16", "float16")


def resolve_dtype(name: str, device: str, config: dict[str, Any] | None = None) -> np.dtype[Any]:
    """`auto` is float32 on a CPU, where 16-bit products are slow, and the checkpoint's own type elsewhere."""
    if name == "auto":
        dtype = (config or {}).get("dtype") or (config or {}).get("torch_dtype")
        return DTYPES["float32"] if device == "cpu" else DTYPES.get(str(dtype), DTYPES["bfloat16"])
    if name not in DTYPES:
        raise SettingsError(f"Unknown dtype '{name}'. Use auto, {', '.join(DTYPES)}.")
    return DTYPES[name]


def computed_in(dtype: np.dtype[Any], device: str) -> np.dtype[Any]:
    """The type of a model's products, activations, keys and values. On a CPU types of 16 bits are those in which its
    matrices are stored; it computes in float32, or in float64."""
    return DTYPES["float32"] if device == "cpu" and dtype.name in HALVES else dtype


def may_be_native(config: dict[str, Any], dtype: np.dtype[Any], device: str) -> bool:
    """True if the forward of a model may be C++, by its config.json alone."""
    if device != "cpu" or dtype != np.float32 or is_encoder(config):
        return False
    pooling = pooling_of(config)
    return pooling is None or not is_in_one_row(config, pooling)


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model that is to be loaded."""

    files: ModelFiles
    link: Link
    stored: np.dtype[Any]
    """The type in which matrices are to be kept, of `resolve_dtype`."""
    device: str
    quant: str | None
    dequantize: bool
    tell: Callable[[float], None]
    kv_type: str | None = None
    """Of a model that C++ computes; None: keys and values are stored as they are computed."""
    shares: tuple[int, ...] = ()
    """By rank, as of `ShardPlan`."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of products and activations."""
        return computed_in(self.stored, self.device)

    @property
    def storage(self) -> np.dtype[Any] | None:
        """The type of 16 bits to which matrices are rounded; None: kept as they are stored."""
        return None if self.stored == self.dtype else self.stored

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
        group = self.link.collective
        recurrent = self.recurrence
        kv_heads = validation.kv_heads(self.files.config)
        by_layer = validation.layer_kv_heads(self.files.config)
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
            self.shares,
        )

    def cache_layout(self, config: Any, plan: ShardPlan) -> CacheLayout:
        """Of a model that torch computes: keys and values have its type."""
        return cache_layout(config, plan, self.dtype, self.device, self.recurrence)

    def native_layout(self, config: Any, plan: ShardPlan) -> CacheLayout:
        """Of a model that C++ computes."""
        stored = self.kv_type or "f32"
        if stored == "auto":  # a vector is made in one pass, and nothing stays
            stored = "f16" if pooling_of(self.files.config) is None else "f32"
        return replace(self.cache_layout(config, plan), stored=STORED_TYPES[stored])


def open_checkpoint(files: ModelFiles, dequantize: bool) -> GgufCheckpoint | Checkpoint:
    """The tensors of a model's files, plain or quantized; `dequantize` makes plain numbers of GGUF blocks."""
    if files.gguf is not None:
        return GgufCheckpoint(files.gguf, dequantize)
    scheme = scheme_of(files.config)
    experts = validation.family_of(files.config).experts
    tensors = text_tensors(files.tensors)
    if experts is not None and experts.together:
        return StoredTogether(tensors)
    if experts is not None and experts.stored_above is not None and scheme is None:
        hidden = files.config["hidden_size"] if experts.any_order else None
        return StoredAbove(tensors, experts.stored_above, hidden, experts.inputs_first)
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

    if (latent := getattr(config, "latent", None)) is not None:
        return CacheLayout((LayerCache(1, latent.row, parts=1),) * config.num_hidden_layers, dtype, device)

    def cache(layer: int) -> LayerCache:
        chunked = kinds[layer] == CHUNKED
        span = config.attention_chunk_size if chunked else window if kinds[layer] == SLIDING else None
        heads = plan.layer_kv_heads[layer] if plan.layer_kv_heads else plan.kv_heads
        layer_config = config if by_layer is None else by_layer[layer]
        head_dim = getattr(layer_config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if hasattr(config, "qk_nope_head_dim"):  # torch expands what all heads share
            head_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
        head_dim = max(head_dim, getattr(config, "v_head_dim", None) or 0)  # a row of values is as wide as one of keys
        return LayerCache(plan.kv_heads_here(heads), head_dim, span, sources.get(layer), chunked=chunked)

    caches = tuple(cache(layer) for layer, kind in enumerate(kinds) if attends(kind))
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
