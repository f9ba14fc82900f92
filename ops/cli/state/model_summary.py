"""A model's files in numbers: architecture, parameters, types of tensors, context, licence; no weight is read."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from control.messages import ModelKind
from worker.repository.assets import chat_template
from worker.repository.files import ModelFiles
from worker.repository.pooling.description import pooling_of
from worker.repository.validation import context_length
from worker.weights.gguf import GgufModel
from worker.weights.schemes import scheme_of

_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Types of plain weights in safetensors files."""
_PACKED = {"I32": 8, "U8": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1}
"""Weights in one number of a quantized checkpoint's type: four bits each, but for bytes."""
_BESIDE = ("scale", "scales", "zero", "zeros", "g_idx", "weight_shape", "zero_point")
"""Last parts of the names of tensors that are no weights."""
_FILE_TYPES: dict[int, str] = {
    **dict(enumerate(("F32", "F16", "Q4_0", "Q4_1"))),
    **dict(enumerate(("Q8_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L"), 7)),
    **dict(enumerate(("Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"), 14)),
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    30: "IQ4_XS",
    32: "BF16",
    37: "TQ2_0",
    38: "MXFP4_MOE",
}
"""`general.file_type` of GGUF files, by llama.cpp's numbers (llama.h, llama_ftype)."""
_LICENCE = re.compile(r"^license:\s*(\S+)", re.MULTILINE)


class TensorKind(msgspec.Struct, frozen=True, kw_only=True):
    tensors: int
    bytes: int


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    bytes: int


class ModelSummary(msgspec.Struct, frozen=True, kw_only=True):
    """`parameters` counts weights, those of packed tensors too; `quantization` is the stored one, None for plain
    weights. `types` has the tensors of each stored type. `template` is the text of the chat template."""

    kind: ModelKind
    architecture: str
    parameters: int
    quantization: str | None
    context_length: int
    vocab_size: int
    layers: int | None
    hidden_size: int | None
    heads: int | None
    kv_heads: int | None
    experts: int | None
    images: bool
    template: str | None
    licence: str | None
    files: list[ModelFile]
    types: dict[str, TensorKind]


class _Tensor(NamedTuple):
    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    weights: int


def summarize(files: ModelFiles, images: bool = True) -> ModelSummary:
    """Raises ModelFilesError, OSError where a file went away."""
    config, pooling = files.config, pooling_of(files.config)
    tensors = list(_gguf_tensors(files.gguf) if files.gguf is not None else _tensors(files.weights))
    return ModelSummary(
        kind="generate" if pooling is None else pooling.kind,
        architecture=str(config["model_type"]),
        parameters=sum(one.weights for one in tensors),
        quantization=_quantization(files, tensors),
        context_length=context_length(config),
        vocab_size=int(config["vocab_size"]),
        layers=_number(config, "num_hidden_layers"),
        hidden_size=_number(config, "hidden_size"),
        heads=_number(config, "num_attention_heads"),
        kv_heads=_number(config, "num_key_value_heads") or _number(config, "num_attention_heads"),
        experts=_number(config, "num_experts") or _number(config, "num_local_experts"),
        images=images and "image_part" in config,
        template=_template(files),
        licence=_licence(files),
        files=[ModelFile(path=str(path), bytes=path.stat().st_size) for path in files.weights],
        types=_types(tensors),
    )


def _types(tensors: list[_Tensor]) -> dict[str, TensorKind]:
    """The most bytes first."""
    counts: dict[str, tuple[int, int]] = {}
    for one in tensors:
        count, size = counts.get(one.type, (0, 0))
        counts[one.type] = count + 1, size + one.bytes
    order = sorted(counts.items(), key=lambda item: -item[1][1])
    return {name: TensorKind(tensors=count, bytes=size) for name, (count, size) in order}


def _tensors(paths: list[Path]) -> Iterator[_Tensor]:
    for path in paths:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                shape, kind = tuple(entry["shape"]), str(entry["dtype"])
                yield _Tensor(name, kind.lower(), shape, end - begin, _weights(name, kind, shape))


def _weights(name: str, kind: str, shape: tuple[int, ...]) -> int:
    """Weights of a tensor, 0 for scales and the like."""
    last = name.rpartition(".")[2]
    if last in _BESIDE or last.endswith(("_scale", "_scales", "_scale_inv", "_zero_point", "qzeros")):
        return 0
    return prod(shape) * (1 if kind in _SIZES else _PACKED.get(kind, 1))


def _gguf_tensors(model: GgufModel) -> Iterator[_Tensor]:
    for name, one in model.tensors.items():
        yield _Tensor(name, one.type.name, one.shape, one.bytes, prod(one.shape))


def _quantization(files: ModelFiles, tensors: list[_Tensor]) -> str | None:
    if files.gguf is not None:
        blocks = [name for name in _types(tensors) if name not in ("f32", "f16", "bf16")]
        return _FILE_TYPES.get(files.gguf.whole("general.file_type", -1, least=0), blocks[0]) if blocks else None
    scheme = scheme_of(files.config)
    return None if scheme is None else f"{scheme.method} ({', '.join(sorted(scheme.kinds))})"


def _template(files: ModelFiles) -> str | None:
    if files.gguf is not None:
        return files.gguf.text("tokenizer.chat_template", None)
    return None if files.folder is None else chat_template(files.folder, files.tokenizer_config)


def _licence(files: ModelFiles) -> str | None:
    """As the files name it: a GGUF file's field, else the head of README.md, else the name of a licence's file."""
    if files.gguf is not None and (named := files.gguf.text("general.license", None)):
        return str(named)
    if files.folder is None:
        return None
    try:
        if found := _LICENCE.search((files.folder / "README.md").read_text(encoding="utf-8", errors="replace")[:4096]):
            return found[1].strip("\"'")
    except OSError:
        pass
    return next((path.name for path in sorted(files.folder.glob("LICENSE*"))), None)


def _number(config: Mapping[str, Any], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
