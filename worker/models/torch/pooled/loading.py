"""Loads the parts of a model for vectors or scores: an encoder, projections, and a head that changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from control.errors import ModelFilesError
from worker.collective import Collective
from worker.collective.base import Link
from worker.kv.base import WholeLayout
from worker.models.torch.layers.packing import packing
from worker.models.torch.pooled.encoder import BertEncoder
from worker.models.torch.pooled.modern import ModernEncoder
from worker.models.torch.pooled.pooler import Pooler, Projection
from worker.models.torch.pooled.row_threads import RowThreads
from worker.models.torch.served import TorchModel
from worker.repository.files import ModelFiles
from worker.repository.pooling.description import Pooling
from worker.repository.pooling.encoders import ENCODERS, renamed
from worker.tensors import as_tensor, number_type
from worker.weights.checkpoint import Checkpoint, checked
from worker.weights.safetensors_header import read_headers, text_tensors

_PREFIXES = ("", "bert.", "roberta.", "model.", "mpnet.", "distilbert.")
_OLDER = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}


class Reader:
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
        read = Reader(checkpoint, dtype, device)
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
            read = Reader(checkpoint, dtype, device)
            weight = read("linear.weight", [dense.outputs, dense.inputs])
            bias = read("linear.bias", [dense.outputs]) if dense.bias else None
            projections.append(Projection(weight, bias, dense.activation))
    return Pooler(pooling.pool, projections, pooling.normalize)


def label_head(files: ModelFiles, pooling: Pooling, dtype: torch.dtype, device: torch.device) -> list[Projection]:
    """The score of a causal reranker: the logit of its first label less that of the second. Raises ModelFilesError."""
    if pooling.labels is None:
        return []
    with Checkpoint(text_tensors(files.tensors)) as checkpoint:
        read = Reader(checkpoint, dtype, device)
        name = "lm_head.weight" if "lm_head.weight" in read else "model.embed_tokens.weight"
        rows = read(name, [files.config["vocab_size"], files.config["hidden_size"]], list(pooling.labels))
    return [Projection(rows[:1] - rows[1:], None, pooling.activation)]


def show_hidden_states(model: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Let a causal model's logits be its hidden states after the last norm: its head becomes the identity, whose
    products are exact."""
    identity = torch.eye(model.config.hidden_size, dtype=dtype, device=device)
    model.set_output_embeddings(packing(None, dtype, device).pack([identity], None))


def _classifier(config: dict[str, Any], pooling: Pooling, read: Reader) -> list[Projection]:
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


def _stored(read: Reader, name: str) -> str:
    """The name of a parameter in the checkpoint, which may have a norm's older one."""
    for newer, older in _OLDER.items():
        if name not in read and name.endswith(newer):
            return name.removesuffix(newer) + older
    return name


def _prefix(read: Reader, name: str) -> str:
    """The beginning of the checkpoint's names before `name`."""
    for prefix in _PREFIXES:
        if f"{prefix}{name}" in read:
            return prefix
    raise ModelFilesError(f"The weights have no tensor {name}; is this the checkpoint of its config?")
