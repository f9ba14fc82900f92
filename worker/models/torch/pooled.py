"""Pooled models in torch: encoders whose rows become vectors or scores."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from control.errors import ModelFilesError
from worker.collective import Collective
from worker.collective.base import Link
from worker.families.encoders import ENCODERS, first_position, renamed
from worker.families.parts import SLIDING
from worker.kv.base import Variant, WholeLayout
from worker.kv.torch.plain_attention import Bias, WholeAttention
from worker.models.served import Batch
from worker.models.torch.layers import packing
from worker.models.torch.served import TorchModel
from worker.repository.files import ModelFiles
from worker.repository.pooling import Activation, Pool, Pooling
from worker.tensors import as_tensor, number_type
from worker.weights.checkpoint import Checkpoint, checked
from worker.weights.safetensors_header import read_headers, text_tensors

LEAST_TOKENS = 64
"""Fewer tokens of a part make products slow."""


class RowThreads:
    """Threads that each compute their part of a step's sequences alone, so none waits for another in a layer. They end
    with this object.

    torch divides each product among its threads instead, and every product waits for the slowest of them. A thread that
    has lost its processor for a moment then delays all others."""

    def __init__(self, count: int) -> None:
        """`count` is 1 on a device that is no CPU: the caller's thread computes all."""
        self._count = count
        before = torch.get_num_threads()
        self._pool = None if self._count < 2 else ThreadPoolExecutor(self._count, "rows", _alone)
        if self._pool is not None:
            started = Barrier(self._count)
            list(self._pool.map(started.wait, [None] * self._count))
            torch.set_num_threads(before)  # the number for threads to come, which each of the pool's has set to 1

    def run(self, counts: Sequence[int], compute: Callable[[slice], Tensor]) -> list[Tensor]:
        """`compute` for neighbouring sequences together; `counts` are the tokens of each. The results are in order. One
        part alone is computed by the caller's thread."""
        parts = divided(counts, self._count)
        if self._pool is None or len(parts) == 1:
            return [compute(part) for part in parts]
        return list(self._pool.map(torch.inference_mode()(compute), parts))


def divided(counts: Sequence[int], most: int) -> list[slice]:
    """Neighbouring places of `counts` in at most `most` parts of about equal sums, each of LEAST_TOKENS or more."""
    total = sum(counts)
    threads = max(1, min(most, len(counts), total // LEAST_TOKENS))
    borders = [0]
    done = 0
    for place, count in enumerate(counts):
        # The border goes to the side on which it is nearer to an equal share.
        if place > borders[-1] and len(borders) < threads and done + count / 2 > total * len(borders) / threads:
            borders.append(place)
        done += count
    return [slice(start, stop) for start, stop in zip(borders, [*borders[1:], len(counts)], strict=True)]


def _alone() -> None:
    torch.get_num_threads()  # the first call in a thread takes the process's number: it must precede the thread's own
    torch.set_num_threads(1)


# From the hidden states of a batch to a vector or a score of each sequence.


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "identity": lambda values: values,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@dataclass(frozen=True)
class Projection:
    """A linear layer, and the function of its outputs."""

    weight: Tensor
    bias: Tensor | None
    activation: Activation

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, values: Tensor) -> Tensor:
        return _FUNCTIONS[self.activation](functional.linear(values, self.weight, self.bias))


@dataclass(frozen=True)
class Pooler:
    """sentence-transformers' modules after the transformer: pooling, projections, and a length of 1."""

    pool: Pool
    projections: Sequence[Projection] = ()
    normalize: bool = False

    def __call__(self, batch: Batch, hidden_at: Callable[[Batch], Any]) -> Tensor:
        """(sampled rows, dimensions) in float32, or float64 of a float64 model. `hidden_at` computes the hidden states
        of a batch's `sampled` places."""
        values = self._pooled(batch, hidden_at)
        kind = torch.float64 if values.dtype == torch.float64 else torch.float32
        for projection in self.projections:
            values = projection(values.to(projection.weight.dtype))
        values = values.to(kind)
        return functional.normalize(values, dim=-1) if self.normalize else values

    def _pooled(self, batch: Batch, hidden_at: Callable[[Batch], Any]) -> Tensor:
        if self.pool == "last":
            return _tensor(hidden_at(batch))
        counts = [len(row.tokens) for row in batch.rows]
        if self.pool == "cls":
            return _tensor(hidden_at(replace(batch, sampled=np.cumsum([0, *counts[:-1]]))))
        hidden = _tensor(hidden_at(replace(batch, sampled=np.arange(sum(counts)))))
        return torch.stack([part.mean(dim=0) for part in hidden.split(counts)])


def _tensor(values: Any) -> Tensor:
    """The hidden states of either forward."""
    return values if isinstance(values, Tensor) else as_tensor(values)


# Encoders of BERT's form over a flat batch, with BERT's names of parameters: BERT, RoBERTa, DistilBERT, MPNet.
#
# Source: Devlin et al., BERT; Song et al., MPNet. The order of norms, the positions and the heads are those of
# transformers' modules.


_gelu_tanh = functools.partial(functional.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
}

_BUCKETS = 32


class UninitializedLinear(nn.Linear):
    """Its parameters come from a checkpoint: to initialise them on the meta device would import torch's compiler."""

    def reset_parameters(self) -> None:
        pass


class UninitializedEmbedding(nn.Embedding):
    """As `UninitializedLinear`."""

    def reset_parameters(self) -> None:
        pass


class FlatEncoder(nn.Module):
    """An encoder over a flat batch; a caller's `logits` are the hidden states of the places that it wants."""

    layers: nn.ModuleList

    def __init__(self, config: dict[str, Any], threads: RowThreads) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self._threads = threads

    @property
    def base_model(self) -> Any:
        return SimpleNamespace(layers=self.layers)

    def hidden(self, ids: Tensor, positions: Tensor, types: Tensor, step: WholeAttention) -> Tensor:
        """The hidden states (T, hidden) of neighbouring sequences; ids, positions and types are (T,)."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        logits_to_keep: Tensor,
        cache_step: WholeAttention,
        token_type_ids: Tensor | None = None,
        use_cache: bool = False,
    ) -> Any:
        """Ids, positions and types (1, T) of all sequences one after the other; `logits` (1, places, hidden)."""
        ids = input_ids[0]
        positions = position_ids[0]
        types = torch.zeros_like(ids) if token_type_ids is None else token_type_ids[0]

        def compute(rows: slice) -> Tensor:
            tokens, step = cache_step.part(rows)
            return self.hidden(ids[tokens], positions[tokens], types[tokens], step)

        parts = self._threads.run([extent.count for extent in cache_step.extents], compute)
        return SimpleNamespace(logits=torch.cat(parts)[logits_to_keep].unsqueeze(0))


class BertEncoder(FlatEncoder):
    def __init__(self, config: dict[str, Any], threads: RowThreads) -> None:
        super().__init__(config, threads)
        self.embeddings = _Embeddings(config)
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(_Layer(config, index) for index in range(config["num_hidden_layers"]))
        self.layers = self.encoder.layer
        self._relative = ENCODERS[config["model_type"]].relative
        if self._relative:
            self.encoder.relative_attention_bias = UninitializedEmbedding(_BUCKETS, config["num_attention_heads"])

    def hidden(self, ids: Tensor, positions: Tensor, types: Tensor, step: WholeAttention) -> Tensor:
        hidden = self.embeddings(ids, positions, types)
        bias = functools.cache(self._bias) if self._relative else None
        for layer in self.layers:
            hidden = layer(hidden, step, bias)
        return hidden

    def _bias(self, count: int) -> Tensor:
        """(1, heads, count, count): MPNet's learned bias of a position (row) for another one (column)."""
        weight: Tensor = self.encoder.relative_attention_bias.weight  # type: ignore[assignment, union-attr]  # a module
        places = torch.arange(count, device=weight.device)
        behind = places[:, None] - places[None, :]
        return weight[_bucket(behind)].permute(2, 0, 1).unsqueeze(0)


def _bucket(behind: Tensor) -> Tensor:
    """The bucket of each distance: half of them for later positions; small distances have one of their own, and those
    up to 128 share the others logarithmically."""
    half = _BUCKETS // 2
    exact = _BUCKETS // 4
    away = behind.abs()
    large = exact + (torch.log(away.float() / exact) / math.log(128 / exact) * (half - exact)).long()
    return (behind < 0).long() * half + torch.where(away < exact, away, large.clamp(max=half - 1))


class _Embeddings(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        types = config.get("type_vocab_size", 2) if ENCODERS[config["model_type"]].types else 0
        self.word_embeddings = UninitializedEmbedding(config["vocab_size"], hidden)
        self.position_embeddings = UninitializedEmbedding(config["max_position_embeddings"], hidden)
        self.token_type_embeddings = UninitializedEmbedding(types, hidden) if types else None
        self.LayerNorm = _norm(config)
        self._first = first_position(config)
        self._types = types

    def forward(self, ids: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        summed = self.word_embeddings(ids)
        if self.token_type_embeddings is not None:
            summed = summed + self.token_type_embeddings(types.clamp(max=self._types - 1))
        return self.LayerNorm(summed + self.position_embeddings(positions + self._first))


class _Layer(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        self.attention = nn.Module()
        self.attention.self = _Attention(config, index)
        self.attention.output = _Output(config, hidden)
        self.intermediate = nn.Module()
        self.intermediate.dense = UninitializedLinear(hidden, inner)
        self.output = _Output(config, inner)
        self._activation = ACTIVATIONS[config.get("hidden_act", "gelu")]

    def forward(self, hidden: Tensor, step: WholeAttention, bias: Bias | None) -> Tensor:
        attended = self.attention.output(self.attention.self(hidden, step, bias), hidden)  # type: ignore[operator]  # modules
        inner = self._activation(self.intermediate.dense(attended))  # type: ignore[operator]  # a module
        return self.output(inner, attended)


class _Attention(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.query, self.key, self.value = (UninitializedLinear(hidden, hidden) for _ in range(3))
        self._index = index
        self._heads = config["num_attention_heads"]
        self._variant = Variant(scaling=(hidden // self._heads) ** -0.5)

    def forward(self, hidden: Tensor, step: WholeAttention, bias: Bias | None) -> Tensor:
        query, key, value = (
            linear(hidden).view(len(hidden), self._heads, -1).transpose(0, 1)
            for linear in (self.query, self.key, self.value)
        )
        return step.attend(self._index, query, key, value, self._variant, bias).flatten(1)


class _Output(nn.Module):
    """A projection that is added to what came in, and a norm."""

    def __init__(self, config: dict[str, Any], inputs: int) -> None:
        super().__init__()
        self.dense = UninitializedLinear(inputs, config["hidden_size"])
        self.LayerNorm = _norm(config)

    def forward(self, hidden: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(hidden) + before)


def _norm(config: dict[str, Any]) -> nn.LayerNorm:
    return nn.LayerNorm(config["hidden_size"], eps=config.get("layer_norm_eps", 1e-12))


# ModernBERT over a flat batch, with its parameters' names: norms before, rotary positions, gates, local layers.
#
# Source: Warner et al., ModernBERT; the order of norms, gates and windows is that of transformers' modules.


Turn = tuple[Tensor, Tensor]
"""Cosines and sines (T, head dim) of a type of layer."""


class ModernEncoder(FlatEncoder):
    def __init__(self, config: dict[str, Any], threads: RowThreads) -> None:
        super().__init__(config, threads)
        self.embeddings = nn.Module()
        self.embeddings.tok_embeddings = UninitializedEmbedding(config["vocab_size"], config["hidden_size"])
        self.embeddings.norm = _modern_norm(config)
        self.layers = nn.ModuleList(_ModernLayer(config, index) for index in range(config["num_hidden_layers"]))
        self.final_norm = _modern_norm(config)
        self._thetas: dict[str, float] = config["thetas"]
        self._dim = config["hidden_size"] // config["num_attention_heads"]

    def hidden(self, ids: Tensor, positions: Tensor, types: Tensor, step: WholeAttention) -> Tensor:
        hidden = self.embeddings.norm(self.embeddings.tok_embeddings(ids))  # type: ignore[operator]  # modules
        turns = {kind: self._turn(theta, positions, hidden.dtype) for kind, theta in self._thetas.items()}
        for layer in self.layers:
            hidden = layer(hidden, step, turns)
        return self.final_norm(hidden)

    def _turn(self, theta: float, positions: Tensor, dtype: torch.dtype) -> Turn:
        """Angles are float32, as transformers has them."""
        places = torch.arange(0, self._dim, 2, dtype=torch.float32, device=positions.device)
        angles = positions.float()[:, None] * (1.0 / theta ** (places / self._dim))
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class _ModernLayer(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        self.attn_norm = _modern_norm(config) if index else nn.Identity()
        self.attn = _ModernAttention(config, index)
        self.mlp_norm = _modern_norm(config)
        self.mlp = _Gated(config)
        self._kind: str = config["layer_types"][index]

    def forward(self, hidden: Tensor, step: WholeAttention, turns: dict[str, Turn]) -> Tensor:
        hidden = hidden + self.attn(self.attn_norm(hidden), step, turns[self._kind])
        return hidden + self.mlp(self.mlp_norm(hidden))


class _ModernAttention(nn.Module):
    def __init__(self, config: dict[str, Any], index: int) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        biased = config.get("attention_bias", False)
        self.Wqkv = UninitializedLinear(hidden, 3 * hidden, bias=biased)
        self.Wo = UninitializedLinear(hidden, hidden, bias=biased)
        self._index = index
        self._heads = config["num_attention_heads"]
        local = config["layer_types"][index] == SLIDING
        # A position sees those up to half of `local_attention` away.
        window = config["local_attention"] // 2 + 1 if local else None
        self._variant = Variant(scaling=(hidden // self._heads) ** -0.5, window=window)

    def forward(self, hidden: Tensor, step: WholeAttention, turn: Turn) -> Tensor:
        query, key, value = self.Wqkv(hidden).view(len(hidden), 3, self._heads, -1).permute(1, 2, 0, 3)
        return self.Wo(
            step.attend(self._index, _turned(query, turn), _turned(key, turn), value, self._variant).flatten(1)
        )


class _Gated(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        inner = config["intermediate_size"]
        biased = config.get("mlp_bias", False)
        self.Wi = UninitializedLinear(hidden, 2 * inner, bias=biased)
        self.Wo = UninitializedLinear(inner, hidden, bias=biased)
        self._activation = ACTIVATIONS[config.get("hidden_act", "gelu")]

    def forward(self, hidden: Tensor) -> Tensor:
        inner, gate = self.Wi(hidden).chunk(2, dim=-1)
        return self.Wo(self._activation(inner) * gate)


def _turned(heads: Tensor, turn: Turn) -> Tensor:
    """(heads, T, dim), turned by position."""
    cosines, sines = turn
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat((-second, first), dim=-1) * sines


def _modern_norm(config: dict[str, Any]) -> nn.LayerNorm:
    bias = config.get("norm_bias", False)
    return nn.LayerNorm(config["hidden_size"], eps=config.get("norm_eps", 1e-5), bias=bias)


# Loads the parts of a model for vectors or scores: an encoder, projections, and a head that changes nothing.


_PREFIXES = ("", "bert.", "roberta.", "model.", "mpnet.", "distilbert.")
_OLDER = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


class ParameterReader:
    """Reads tensors as parameters of one type on one device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def __call__(self, name: str, shape: list[int], rows: list[int] | None = None) -> Tensor:
        """The tensor, or these rows of it. Raises ModelFilesError for one that is missing or has another shape."""
        stored = as_tensor(checked(name, self._checkpoint.read(name), shape))
        if rows is not None:
            stored = stored[rows]
        return stored.to(self._device, self._dtype, copy=True)


def load_encoder(
    files: ModelFiles,
    pooling: Pooling,
    collective: Collective,
    dtype: torch.dtype,
    device: torch.device,
    tell: Callable[[float], None],
) -> TorchModel:
    """An encoder, ready to serve. `tell` is called with the share of the checkpoint that was read. Raises
    ModelFilesError."""
    config = files.config
    family = ENCODERS[config["model_type"]]
    threads = RowThreads(torch.get_num_threads() if device.type == "cpu" else 1)
    with torch.device("meta"):
        encoder = (ModernEncoder if family.rotary else BertEncoder)(config, threads).eval()
    with Checkpoint(text_tensors(files.tensors)) as checkpoint:
        read = ParameterReader(checkpoint, dtype, device)
        prefix = _prefix(read, f"embeddings.{'tok' if family.rotary else 'word'}_embeddings.weight")
        for name, module in encoder.named_modules():
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                stored = _stored(read, prefix + renamed(f"{name}.{leaf}", family))
                loaded = read(stored, list(parameter.shape))
                setattr(module, leaf, nn.Parameter(loaded, requires_grad=False))
            tell(checkpoint.read_share)
        head = _classifier(config, pooling, read) if pooling.kind == "score" else []
    pooler = load_pooler(pooling, dtype, device, head)
    layout = WholeLayout(False, number_type(dtype), str(device))
    return TorchModel(encoder, Link(collective), layout, config["vocab_size"], pooler)


def load_pooler(pooling: Pooling, dtype: torch.dtype, device: torch.device, head: Sequence[Projection] = ()) -> Pooler:
    """The pooler, with the projections that have files of their own behind those of `head`. Raises ModelFilesError."""
    projections = list(head)
    for dense in pooling.dense:
        with Checkpoint(read_headers([Path(dense.weights)])) as checkpoint:
            read = ParameterReader(checkpoint, dtype, device)
            weight = read("linear.weight", [dense.outputs, dense.inputs])
            bias = read("linear.bias", [dense.outputs]) if dense.bias else None
            projections.append(Projection(weight, bias, dense.activation))
    return Pooler(pooling.pool, projections, pooling.normalize)


def label_head(files: ModelFiles, pooling: Pooling, dtype: torch.dtype, device: torch.device) -> list[Projection]:
    """The score of a causal reranker: the logit of its first label less that of the second. Raises ModelFilesError."""
    if pooling.labels is None:
        return []
    with Checkpoint(text_tensors(files.tensors)) as checkpoint:
        read = ParameterReader(checkpoint, dtype, device)
        name = "lm_head.weight" if "lm_head.weight" in read else "model.embed_tokens.weight"
        rows = read(name, [files.config["vocab_size"], files.config["hidden_size"]], list(pooling.labels))
    return [Projection(rows[:1] - rows[1:], None, pooling.activation)]


def show_hidden_states(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Let a causal model's logits be its hidden states after the last norm: its head becomes the identity, whose
    products are exact."""
    identity = torch.eye(model.config.hidden_size, dtype=dtype, device=device)
    model.set_output_embeddings(packing(None, dtype, device).pack([identity], None))


def _classifier(config: dict[str, Any], pooling: Pooling, read: ParameterReader) -> list[Projection]:
    """The head of a cross-encoder: BERT's pooler and classifier, or RoBERTa's classifier of two layers."""
    hidden = config["hidden_size"]
    if "classifier.out_proj.weight" in read:
        inner = "classifier.dense"
        outer = "classifier.out_proj"
    else:
        inner = f"{_prefix(read, 'pooler.dense.weight')}pooler.dense"
        outer = "classifier"
    return [
        Projection(read(f"{inner}.weight", [hidden, hidden]), read(f"{inner}.bias", [hidden]), "tanh"),
        Projection(read(f"{outer}.weight", [1, hidden]), read(f"{outer}.bias", [1]), pooling.activation),
    ]


def _stored(read: ParameterReader, name: str) -> str:
    """The name of a parameter in the checkpoint, which may have a norm's older one."""
    for newer, older in _OLDER.items():
        if name not in read and name.endswith(newer):
            return name.removesuffix(newer) + older
    return name


def _prefix(read: ParameterReader, name: str) -> str:
    """The beginning of the checkpoint's names before `name`."""
    for prefix in _PREFIXES:
        if f"{prefix}{name}" in read:
            return prefix
    raise ModelFilesError(f"The weights have no tensor {name}; is this the checkpoint of its config?")
