"""Builds one rank's shard of a model, each parameter read only as far as it is kept.

A model whose forward is C++ is loaded here, without torch. All others are torch/loading.py's, which is imported for
them alone: torch and transformers take seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401  # numpy then knows bfloat16 by its name
import numpy as np
import structlog
from numpy.typing import NDArray

from control.errors import SettingsError, UnsupportedArchitecture
from control.quantization import BLOCK_QUANTS, check_kv_type, check_quant
from worker.collective import Collective
from worker.collective.base import Link
from worker.kv.base import STORED_TYPES
from worker.models.native import recurrent
from worker.models.native.config import native_config
from worker.models.native.forward import NativeModel, plan_of
from worker.models.native.linear import (
    HALVES,
    Embedding,
    PackedEmbedding,
    PackedExperts,
    PackedHeads,
    PackedLinear,
    SplitEmbedding,
    kept_as,
)
from worker.models.native.module import Module, NotNative, Unfilled, require
from worker.models.native.modules import LAYERS_TABLE, CausalModel, LatentWeights, Linear, native_meta_model
from worker.models.served import ServedModel
from worker.models.shard import (
    DOWN,
    LinearGroup,
    RankWeights,
    Shard,
    are_experts,
    computed_in,
    first_leaf,
    groups_of,
    have_biases,
    may_be_native,
    resolve_dtype,
    rounded,
    sizes_of,
)
from worker.native.host import unavailable
from worker.native.library import KindMissing, Threads, reason_missing, threads_here
from worker.repository import quantized, torch_part, validation
from worker.repository.files import ModelFiles, inspect
from worker.repository.fingerprint import fingerprint
from worker.repository.kinds import kinds_of
from worker.repository.multimodal import part_of
from worker.repository.pooling import is_encoder, pooling_of
from worker.selftest.shapes import Shapes, of_config
from worker.weights.cache import WeightCache, subject_of
from worker.weights.checkpoint import StoredTensors
from worker.weights.quantizer import Quantizer
from worker.weights.sharding import ShardPlan
from worker.weights.stored_matrix import StoredMatrix, Weights

if TYPE_CHECKING:
    from worker.models.torch.vision import VisionTower  # it imports torch and transformers


log = structlog.get_logger()


def load(
    source: ModelFiles | Path,
    *,
    collective: Collective,
    dtype: str = "auto",
    quant: str | None = None,
    dequantize: bool = False,
    kv_type: str | None = None,
    device: str = "cpu",
    tell: Callable[[float], None] = lambda share: None,
    cache: WeightCache | None = None,
    shares: Sequence[int] = (),
) -> ServedModel:
    """This rank's shard, ready to serve. `kv_type`: as of a specification; None: keys and values are stored in the
    type in which they are computed. `tell` is called with the share of the checkpoint that was read. Packed weights are
    read from `cache`, or kept there. `shares`: by rank, how many units of all heads and widths it has; empty for even
    ones. Ranks exchange nothing, so each may load at its own speed. Raises ModelFilesError,
    UnsupportedArchitecture or SettingsError."""
    files = source if isinstance(source, ModelFiles) else inspect(source)
    config = files.config
    ranks = collective.world_size
    if shares:
        validation.check_shares(config, shares, ranks, quant)
    else:
        validation.check(config, ranks, quant=quant)
    check_quant(quant, dtype, [device])
    if kv_type is not None:
        check_kv_type(kv_type, dtype, [device])
    quantized.check(config, files.tensors, sum(shares) or ranks, [device])
    validation.check_devices(config, [device])
    shard = Shard(
        files=files,
        link=Link(collective),
        stored=resolve_dtype(dtype, device, config),
        device=device,
        quant=quant,
        dequantize=dequantize,
        kv_type=kv_type,
        tell=tell,
        shares=tuple(shares),
    )
    shapes = None if is_encoder(config) else of_config(config, dtype, ranks)
    try:
        return _load(shard, kinds_of(files, quant, dequantize, dtype), shapes, cache)
    except KindMissing as missing:
        log.warning("loading again with every kind of weights", reason=str(missing), action="load_again")
        return _load(shard, None, shapes, cache)


def _load(shard: Shard, kinds: frozenset[str] | None, shapes: Shapes | None, cache: WeightCache | None) -> ServedModel:
    """`kinds`: those of weights for which the C++ library is compiled, as the files promise them; None: all. Raises
    KindMissing where they are not enough."""
    config = shard.files.config
    if may_be_native(config, shard.dtype, shard.device):
        threads = threads_here(kinds, shapes)
        try:
            require(threads is not None, reason_missing())
            model = _meta_model(config, shard.link.collective.world_size)
        except NotNative as reason:
            log.info("torch runs the forward", reason=str(reason), action="choose_forward")
        else:
            assert threads is not None
            served = _native(shard, model, threads, cache)
            if served is not None:
                return served
            log.warning("loading again with transformers", action="load_again")
    kv_type = shard.kv_type
    if kv_type not in (None, "auto") and STORED_TYPES[kv_type].element != shard.dtype:
        raise SettingsError(
            f"--kv-type {kv_type}: torch computes this model, and stores keys and values in {shard.dtype.name}. Leave "
            "--kv-type out."
        )
    if shard.shares:
        raise UnsupportedArchitecture(f"Ranks with the shares {list(shard.shares)} need a model that C++ computes.")
    torch_part.check("torch computes this model")
    from worker.models.torch import loading as torch_loading  # only here: it imports torch

    return torch_loading.load(shard, kinds, shapes)


def _native(shard: Shard, model: CausalModel, threads: Threads, cache: WeightCache | None) -> ServedModel | None:
    """`model`, a meta model, as it was kept in `cache`, else filled from the checkpoint and kept there. None where its
    forward can't be C++."""
    files = shard.files
    group = shard.link.collective
    if cache is None or not cache.on or pooling_of(files.config) is not None:
        return _served(shard, _filled(shard, model, threads)[0], threads)
    made_of = fingerprint(files, shard.stored.name, shard.quant, shard.dequantize)
    subject = subject_of(files.weights, made_of, shard.quant, group.rank, group.world_size, threads, shard.shares)
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
        plan = shard.plan(model.config, model.family, borders)
        NativeLoader(shard, model, checkpoint, plan, threads, quantizer).fill()
        shard.check_read(checkpoint, model.config)
    if quantizer is not None:
        quantizer.report()
    return model, quantizer


def _served(shard: Shard, model: CausalModel, threads: Threads) -> ServedModel | None:
    """`model`, filled, ready to serve; None where its forward can't be C++."""
    pooling = pooling_of(shard.files.config)
    if pooling is not None:
        # Its hidden states make a vector or a score: the head is the identity, whose products are exact.
        identity = np.eye(model.config.hidden_size, dtype=np.float32)
        model.lm_head = PackedLinear([identity], None, ["float32"], threads)
    layout = shard.native_layout(model.config, shard.plan(model.config, model.family))
    plan = plan_of(model, layout)
    if plan is None:
        return None
    if pooling is None:
        return NativeModel(model, plan, shard.link, layout, tower=_tower(shard, model))
    from worker.models.torch.loading import causal_pooler  # only here: torch pools

    return NativeModel(model, plan, shard.link, layout, pooler=causal_pooler(shard, pooling))


def _tower(shard: Shard, model: CausalModel) -> VisionTower | None:
    """The image part, where there is one."""
    if part_of(shard.files.config) is None:
        return None
    from worker.models.torch.loading import tower_of  # only here: the tower is torch's

    return tower_of(shard, model)


def prepare(config: dict[str, Any], dtype: str, device: str) -> None:
    """Import what `load` would, and build the model once without weights. Touches no device."""
    computed = computed_in(resolve_dtype(dtype, device, config), device)
    native = may_be_native(config, computed, device) and unavailable() is None
    try:
        require(native, "torch computes it")
        _meta_model(config)
        is_native = True
    except NotNative:
        is_native = False
    if not is_native or pooling_of(config) is not None or part_of(config) is not None:
        from worker.models.torch import loading as torch_loading  # only here: it imports torch

        if not is_native:
            torch_loading.prepare(config, computed)


def _meta_model(config: dict[str, Any], ranks: int = 1) -> CausalModel:
    """The meta model of a family whose forward is C++. Raises NotNative where transformers has to make it."""
    return native_meta_model(native_config(config, ranks), config)


@dataclass(frozen=True)
class NativeLoader:
    """Fills `model`, a meta model, with its shard's weights: of each tensor only the kept part is read, packed and
    released."""

    shard: Shard
    model: CausalModel
    checkpoint: StoredTensors
    plan: ShardPlan
    threads: Threads
    quantizer: Quantizer | None
    """Makes blocks of the weights of linear layers and of the vocabulary."""

    @cached_property
    def _weights(self) -> RankWeights:
        return RankWeights(self.checkpoint, self.plan, self.model.family)

    def fill(self) -> None:
        """Replace every linear layer, and every unfilled parameter by what this rank keeps of it."""
        # The vocabulary first: it is the largest, and while it is packed there is nothing else yet.
        self._fill_vocabulary()
        self._done()
        self._fill_layers_table()
        for group in list(self._linear_groups()):
            self._fill_group(group)
            self._done()
        for name, module in list(self.model.modules()):
            if isinstance(module, LatentWeights):
                self.model.replace(name, self._packed_heads(name, module))
                self._done()
        for name, module in list(self.model.modules()):
            if are_experts(name):
                self.model.replace(name, self._packed_experts(name, module))
                self._done()
        for name, module in list(self.model.modules()):
            for leaf, place in list(module.numbers()):
                if isinstance(place, Unfilled):
                    setattr(module, leaf, joined([self._weights.read(name, leaf, place.shape)]))
        if self.shard.recurrence is not None:
            recurrent.install(self.model, self.shard.recurrence, self.plan)
        self.model.offset_norms()

    def _done(self) -> None:
        """Release the pages of tensors that are packed or copied."""
        self.checkpoint.release()
        self.shard.tell(self.checkpoint.read_share)

    def _linear_groups(self) -> Iterator[LinearGroup]:
        """Every linear layer but those that stay as they are, once."""
        for path, parent in self.model.modules():
            linears = {name: part for name, part in parent.parts() if isinstance(part, Linear)}
            forms = {name: (linear.weight.shape[1], linear.bias is not None) for name, linear in linears.items()}
            yield from groups_of(path, forms)

    def _fill_group(self, group: LinearGroup) -> None:
        """Put one product where the group's layers were, under their joined names."""
        names = group.full_names()
        parent = self.model.at(group.parent)
        linears: list[Linear] = [getattr(parent, name) for name in group.names]
        weights = [
            self._converted(f"{name}.weight", self._weights.read(name, "weight", linear.weight.shape))
            for name, linear in zip(names, linears, strict=True)
        ]
        bias = None
        if linears[0].bias is not None:
            shapes = [linear.bias.shape for linear in linears if linear.bias is not None]
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
        first = first_leaf(experts)
        layers: dict[str, list[PackedLinear]] = {first: [], DOWN: []}
        sizes = sizes_of(experts, self.model.family)
        read = self._weights
        for leaf, packed in layers.items():
            for number in range(getattr(experts, leaf).shape[0]):
                parts = read.expert(name, leaf, sizes, number)
                bias = joined(read.expert_biases(name, leaf, sizes, number)) if have_biases(experts) else None
                packed.append(self._packed([self._converted(stored, part) for stored, part in parts], bias))
        return PackedExperts(layers[first], layers[DOWN], summed=self.plan.role(name) == "experts")

    def _packed_heads(self, name: str, module: LatentWeights) -> PackedHeads:
        """Each head's matrices of keys, transposed, and of values. Codes become plain numbers: their scales would not
        lie as products read them."""
        stored = self._weights.read(name, "weight", module.weight.shape)
        weights = stored.dequantized(np.float32) if isinstance(stored, StoredMatrix) else stored
        plain = module.widths.plain
        heads = np.split(weights, weights.shape[0] // (plain + module.widths.value_dim))
        keys = [self._head(np.ascontiguousarray(head[:plain].T)) for head in heads]
        return PackedHeads(keys, [self._head(head[plain:]) for head in heads])

    def _head(self, weights: NDArray[Any]) -> PackedLinear:
        """A small matrix, whose errors every position would feel: it keeps 16 bits where others get fewer."""
        plain = self._rounded(weights)
        quant = self.shard.quant
        return self._linear([plain], None, [kept_as(plain, quant) if quant in (None, "f16") else "bfloat16"])

    def _fill_vocabulary(self) -> None:
        model = self.model
        embedding: Any = model.model.embed_tokens
        head: Any = model.lm_head
        shape = embedding.weight.shape
        tied = bool(model.config.tie_word_embeddings)
        table = self._vocabulary("model.embed_tokens.weight", shape)
        bias = None
        if head.bias is not None:
            bias = joined([self._weights.vocabulary("lm_head.bias", head.weight.shape)])
        rounds_tables = self.shard.quant == "int8"  # a scaled embedding's rounding would be scaled too
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
        kind = np.float32 if self.shard.quant is None else np.float16
        return Embedding(self._copied(table, np.dtype(kind)), scale)

    def _copied(self, table: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        return np.array(table, dtype)

    def _of_all_ranks(self, rows: Embedding | PackedEmbedding, whole: int, own_count: int) -> Module:
        """The look-up of a table of `whole` rows, `own_count` of them on this rank."""
        if self.plan.world_size == 1:
            return rows
        return SplitEmbedding(rows, self._weights.first_row(whole), own_count, self.shard.link)

    def _vocabulary(self, name: str, shape: tuple[int, ...]) -> Any:
        rows = self._weights.vocabulary(name, shape)
        return rows if isinstance(rows, StoredMatrix) else self._converted(name, rows)

    def _converted(self, name: str, weights: Any) -> Any:
        """The matrix `name` of a linear layer or of the vocabulary, in blocks or rounded if `--quant` says so."""
        if self.quantizer is not None:
            return self.quantizer.blocks(name, weights)
        return self._rounded(weights)

    def _rounded(self, weights: Any) -> Any:
        return rounded(weights, self.shard.storage)

    def _packed(self, weights: list[Any], bias: NDArray[Any] | None) -> PackedLinear:
        return self._linear(weights, bias, [kept_as(part, self.shard.quant) for part in weights])

    def _linear(self, parts: list[Any], bias: NDArray[Any] | None, kinds: list[str]) -> PackedLinear:
        return PackedLinear(parts, bias, kinds, self.threads)


def joined(parts: list[Weights]) -> NDArray[np.float32]:
    """The parts one under the other in float32, always as a copy: they may be views of the mapped file."""
    plain = [part.dequantized(np.float32) if isinstance(part, StoredMatrix) else part for part in parts]
    return np.concatenate(plain, dtype=np.float32, casting="unsafe") if len(plain) > 1 else plain[0].astype(np.float32)
