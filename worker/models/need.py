"""The memory that a rank needs, from file headers and config.json alone: no weight is read, nothing is compiled; no
torch.

Weights are counted by the code that loads them. `NativeLoader` fills a model from a checkpoint whose bytes are zeros
that take no memory; where it would pack a matrix, only its packed size is noted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from control.placement.need import RankNeed
from control.quantization import BLOCK_QUANTS
from worker.collective import Solo
from worker.collective.base import Link
from worker.kv.base import DOUBLED_BYTES, CacheLayout
from worker.models.loading import NativeLoader
from worker.models.native.config import native_config
from worker.models.native.linear import PackedLinear, runs
from worker.models.native.module import NotNative
from worker.models.native.modules import CausalModel, native_meta_model
from worker.models.native.scratch import scratch_bytes
from worker.models.shard import Shard, may_be_native, open_checkpoint, resolve_dtype
from worker.native.host import panel_outputs, thread_count, unavailable
from worker.repository import multimodal, validation
from worker.repository.config_fields import fields_of, is_tied
from worker.repository.files import ModelFiles
from worker.repository.multimodal import part_of
from worker.repository.pooling import is_encoder, pooling_of
from worker.repository.torch_part import reason_for
from worker.weights.checkpoint import MappedTensors, Ranges
from worker.weights.formats import BlockFormat, StoredTensor
from worker.weights.quantizer import Quantizer
from worker.weights.safetensors_header import text_tensors
from worker.weights.stored_matrix import StoredMatrix, packed_bytes

# The largest step on a CPU: its tokens, and those of them whose logits are sampled (`LeaderLimits`).
STEP_TOKENS = 512
STEP_ROWS = 256
PROCESS_BYTES = 56 * 2**20
"""A rank without torch after some hundred requests: what it has of its own, its part of what it shares with the standby
that it was forked from, and pages of KV memory that short sequences of a small model fill by halves.
`python -m ops.bench.engine.memory` compares it with what ranks take."""
TORCH_BYTES = 320 * 2**20
"""Bytes that torch and transformers add to it."""
GPU_PROCESS_BYTES = 768 * 2**20
"""Of a GPU's memory: the context of a process, workspaces of libraries, captured graphs. Not measured."""
GPU_STEP_BYTES = 2**30
"""The least scratch memory of a step on a GPU, as `worker/kv/torch/stores.py` keeps it free."""


class _Seat(Solo):
    """A rank of a group that does not meet."""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.world_size = world_size


def rank_need(
    files: ModelFiles,
    *,
    tp: int = 1,
    rank: int = 0,
    dtype: str = "auto",
    quant: str | None = None,
    dequantize: bool = False,
    kv_type: str | None = None,
    device: str = "cpu",
    kv_tokens: int | None = None,
    max_context: int | None = None,
    threads: int | None = None,
    shares: tuple[int, ...] = (),
) -> RankNeed:
    """Of the rank `rank` of `tp`. `kv_tokens` None: one context of the longest sequence. `threads`: of the host that
    runs it, this one's by default. `shares`: by rank, as of `ShardPlan`. Raises ModelFilesError,
    UnsupportedArchitecture, SettingsError as a load does."""
    config = files.config
    shard = Shard(
        files=files,
        link=Link(_Seat(rank, tp)),
        stored=resolve_dtype(dtype, device, config),
        device=device,
        quant=quant,
        dequantize=dequantize,
        kv_type=kv_type,
        tell=lambda share: None,
        shares=shares,
    )
    context = validation.context_length(config)
    context = min(context, max_context or context)
    tower = _tower_bytes(files, shard.dtype)
    model = _filled(shard)
    if model is None:
        return _of_torch(shard, kv_tokens or context, tower)
    layout = shard.native_layout(model.config, shard.plan(model.config, model.family))
    cost = layout.cost
    positions = kv_tokens or min(context, cost.rounded(context))
    step = step_bytes(model, layout, positions, context, threads or thread_count(), tp > 1)
    torch = reason_for(config, dtype, [device]) is not None
    return RankNeed(
        weights=model.bytes + tower,
        kv=positions * layout.bytes_per_token,
        step=step + _routers(model),
        process=PROCESS_BYTES + (TORCH_BYTES if torch else 0),
        exact=True,
        kv_tokens=positions,
        bytes_per_token=layout.bytes_per_token,
        cost=cost,
    )


def _filled(shard: Shard) -> CausalModel | None:
    """The model whose parts have their sizes; None where torch computes it."""
    config = shard.files.config
    if not may_be_native(config, shard.dtype, shard.device) or unavailable() is not None:
        return None
    try:
        model = native_meta_model(native_config(config, shard.link.collective.world_size), config)
    except NotNative:
        return None
    panel = panel_outputs()
    quantizer = _Blocks(shard.quant) if shard.quant in BLOCK_QUANTS else None
    checkpoint = _Headers(open_checkpoint(shard.files, shard.dequantize).blank())
    borders = checkpoint.borders if quantizer is None else quantizer.borders
    plan = shard.plan(model.config, model.family, borders)
    threads: Any = None  # nothing is computed
    loader = _SizeLoader(shard, model, checkpoint, plan, threads, quantizer, panel)
    with np.errstate(divide="ignore"):  # a decay's logarithm is taken, of a zero here
        loader.fill()
    if pooling_of(config) is not None:  # the head becomes the identity
        width = model.config.hidden_size
        model.lm_head = _SizedLinear([_blank((width, width), np.dtype(np.float32))], None, ["float32"], panel)
    return model


def _blank(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros that take no memory while nothing is written to them."""
    return np.zeros(shape, dtype)


def _blank_like(read: Any) -> Any:
    """A blank of what a checkpoint gave."""
    if not isinstance(read, StoredMatrix):
        return _blank(read.shape, read.dtype)
    codes, scales, zeros = (
        None if part is None else _blank(part.shape, part.dtype) for part in (read.codes, read.scales, read.zeros)
    )
    assert codes is not None
    return StoredMatrix(read.kind, codes, scales, zeros, read.group)


_LAYER = re.compile(r"(.*?\b(?:layers|blk)\.)(\d+)(\..+)")


class _Headers:
    """The tensors of a blank checkpoint. Of layers whose tensors have the same types and shapes one is read."""

    def __init__(self, checkpoint: MappedTensors) -> None:
        self._checkpoint: Any = checkpoint
        layers: defaultdict[str, list[Any]] = defaultdict(list)
        for name, header in checkpoint.headers.items():
            if match := _LAYER.fullmatch(name):
                layers[match[2]].append((match[3], header.type.name, header.shape))
        self._alike = {layer: frozenset(tensors) for layer, tensors in layers.items()}
        self._read: dict[Any, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    @property
    def borders(self) -> tuple[int, ...]:
        return self._checkpoint.borders

    @property
    def read_share(self) -> float:
        return 0.0

    def release(self) -> None:
        pass

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Any:
        """As the checkpoint, with blanks."""
        match = _LAYER.fullmatch(name)
        if match is None:
            return _blank_like(self._checkpoint.read(name, dim, ranges))
        key = self._alike.get(match[2]), match[3], dim, tuple(ranges or ())
        if key not in self._read:
            self._read[key] = _blank_like(self._checkpoint.read(name, dim, ranges))
        return self._read[key]


class _Blocks(Quantizer):
    """Blank blocks of the formats of a quantizer."""

    def __init__(self, quant: str) -> None:
        super().__init__(quant, None)  # type: ignore[arg-type]  # nothing is computed

    def _quantized(self, name: str, weights: NDArray[Any], format: BlockFormat) -> NDArray[np.uint8]:
        return np.zeros((weights.shape[0], format.row_bytes(weights.shape[1])), np.uint8)


@dataclass(frozen=True)
class _SizedMatrix:
    outputs: int
    bytes: int


class _SizedLinear(PackedLinear):
    """A linear layer that has the sizes of a packed one, and no weights."""

    def __init__(self, parts: list[Any], bias: NDArray[Any] | None, kinds: list[str], panel: int) -> None:
        self.outputs, self.inputs = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self._matrices: list[Any] = []
        for kind, run in runs(parts, kinds):
            outputs = sum(part.shape[0] for part in run)
            group = run[0].group if isinstance(run[0], StoredMatrix) else 0
            self._matrices.append(_SizedMatrix(outputs, packed_bytes(kind, self.inputs, outputs, group, panel)))
        self.bias = None if bias is None else np.zeros(self.outputs + panel, np.float32)


@dataclass(frozen=True)
class _SizeLoader(NativeLoader):
    panel: int = 0

    def _copied(self, table: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        return _blank(table.shape, dtype)

    def _rounded(self, weights: Any) -> Any:
        if self.shard.storage is None or isinstance(weights, StoredMatrix):
            return weights
        return _blank(weights.shape, self.shard.storage)

    def _linear(self, parts: list[Any], bias: NDArray[Any] | None, kinds: list[str]) -> PackedLinear:
        return _SizedLinear(parts, bias, kinds, self.panel)


def _routers(model: CausalModel) -> int:
    """The packed routers of mixtures, which a forward has beside their weights: in float32 at most."""
    names = (".gate", ".router", ".router.proj")
    routers = [part for path, part in model.modules() if path.endswith(names)]
    return sum(numbers.nbytes for part in routers for _, numbers in part.numbers() if isinstance(numbers, np.ndarray))


def step_bytes(
    model: CausalModel, layout: CacheLayout, positions: int, context: int, threads: int, reduced: bool
) -> int:
    """The largest step of the forward in C++: what it works in, its hidden rows, its logits, and what exists twice of a
    pool of KV memory that doubles, a part of a layer. All sequences have `positions` KV tokens together, and each at
    most `context` positions; `reduced`: several ranks compute it."""
    longest = max(1, layout.cost.longest(positions, context))
    tokens = min(STEP_TOKENS, longest)
    rows = min(STEP_ROWS, tokens, max(1, positions // (layout.state_tokens + 1)))
    embedded = 4 * tokens * model.config.hidden_size
    logits = 4 * rows * model.config.vocab_size
    logits += logits // 2  # malloc keeps a part of those of smaller steps
    scratch = scratch_bytes(model, layout, tokens, rows, longest, threads, reduced, panel_outputs() // 2)
    twice = DOUBLED_BYTES // 2 // (2 * max(1, len(layout.places)))
    return scratch + 2 * embedded + logits + twice


def _tower_bytes(files: ModelFiles, dtype: np.dtype[Any]) -> int:
    """The encoder of images, whole on every rank."""
    part = part_of(files.config)
    if part is None:
        return 0
    shapes = multimodal.expected(part, files.config["hidden_size"])
    return sum(map(prod, shapes.values())) * dtype.itemsize


def _of_torch(shard: Shard, positions: int, tower: int) -> RankNeed:
    """Of a model whose modules are torch's, about: numbers in the type of the model, codes as they are stored."""
    config = shard.files.config
    ranks = shard.link.collective.world_size
    family = None if is_encoder(config) else validation.family_of(config)
    roles = {} if family is None else family.roles
    layout = None if family is None else _torch_layout(shard)
    weights = 0
    for name, tensor in _stored(shard.files).items():
        match = _LAYER.fullmatch(name)
        module = match[3][1:].rpartition(".")[0] if match else name.rpartition(".")[0]
        split = module in roles or "experts" in module or (not match and len(tensor.shape) > 1)
        size = _torch_bytes(tensor, shard.dtype)
        weights += -(-size // ranks) if split else size
    each = 0 if layout is None else layout.bytes_per_token
    hidden = int(config.get("hidden_size", 0))
    vocabulary = int(config.get("vocab_size", 0))
    inner = int(config.get("intermediate_size") or 4 * hidden)
    tokens = min(STEP_TOKENS, positions)
    step = shard.dtype.itemsize * tokens * (8 * hidden + 3 * inner) + 3 * 4 * min(STEP_ROWS, tokens) * vocabulary
    on_gpu = shard.device.startswith("cuda")
    return RankNeed(
        weights=weights + tower,
        kv=positions * each,
        step=max(step, GPU_STEP_BYTES) if on_gpu else step,
        process=GPU_PROCESS_BYTES if on_gpu else PROCESS_BYTES + TORCH_BYTES,
        exact=False,
        kv_tokens=positions,
        bytes_per_token=each,
    )


def _stored(files: ModelFiles) -> Mapping[str, StoredTensor]:
    """The tensors of the text part; without a head that is the embedding once more."""
    tensors = files.tensors if files.gguf is not None else text_tensors(files.tensors)
    tied = is_tied(files.config)
    return {name: tensor for name, tensor in tensors.items() if not (tied and name == "lm_head.weight")}


def _torch_bytes(tensor: StoredTensor, dtype: np.dtype[Any]) -> int:
    numbers = prod(tensor.shape)
    is_plain = tensor.type.name in ("F64", "F32", "F16", "BF16", "f32", "f16", "bf16")
    return numbers * dtype.itemsize if is_plain else tensor.bytes


def _torch_layout(shard: Shard) -> CacheLayout:
    """The cache of a decoder that torch computes; where only transformers reads its configuration, all layers count as
    layers that attend, with heads of one width."""
    config = shard.files.config
    ranks = shard.link.collective.world_size
    family = validation.family_of(config)
    try:
        described = native_config(config, ranks)
    except NotNative:
        hidden = config["hidden_size"]
        heads = config["num_attention_heads"]
        described = SimpleNamespace(
            hidden_size=hidden,
            num_attention_heads=heads,
            num_hidden_layers=config["num_hidden_layers"],
            head_dim=config.get("head_dim") or hidden // heads,
        )
    if family.latent:  # torch keeps each head's keys and values
        fields = fields_of(config, family)
        described = SimpleNamespace(
            num_attention_heads=config["num_attention_heads"],
            num_hidden_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            **{name: fields[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
        )
    return shard.cache_layout(described, shard.plan(described, family))
