"""A short name for a model's weights, the same on every host that has the same files, without reading them all."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from worker.repository.files import ModelFiles, is_gguf
from worker.repository.pooling import pooling_of, without_places
from worker.weights.formats import StoredTensor
from worker.weights.safetensors_header import read_headers

# Places in each tensor that are read, evenly apart, and how much at each.
SAMPLES = 8
SAMPLE_BYTES = 32


class Fingerprints(NamedTuple):
    """16 hexadecimal digits each."""

    stored: str
    """Of the files alone."""
    packed: str
    """Of the files and the packing."""


def fingerprint(files: ModelFiles, dtype: str, quant: str | None = None, dequantize: bool = False) -> str:
    """`Fingerprints.packed`."""
    return fingerprints(files, dtype, quant, dequantize).packed


def fingerprints(files: ModelFiles, dtype: str, quant: str | None = None, dequantize: bool = False) -> Fingerprints:
    """Of the configuration, the types, and samples of every tensor. Training, merging or quantizing changes nearly
    every sample. Raises OSError if a file went away."""
    packing = [quant, "dequantized"] if dequantize else quant
    config = files.config
    pooling = pooling_of(files.config)
    by_file: dict[Path, list[StoredTensor]] = {path: [] for path in sorted(files.weights, key=lambda path: path.name)}
    tensors = list(files.tensors.values())
    if pooling is not None:
        tensors += read_headers(Path(dense.weights) for dense in pooling.dense).values()
        config = without_places(config)
    for tensor in tensors:
        by_file.setdefault(tensor.path, []).append(tensor)
    stored = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    packed = hashlib.sha256(json.dumps([config, dtype, packing], sort_keys=True).encode())
    for path, tensors in by_file.items():
        for sample in _samples(path, tensors):
            stored.update(sample)
            packed.update(sample)
    return Fingerprints(stored.hexdigest()[:16], packed.hexdigest()[:16])


def _samples(path: Path, tensors: list[StoredTensor]) -> Iterator[bytes]:
    """The header of a file, and samples of its tensors."""
    begin = 0 if is_gguf(path) else 8  # behind the length of a safetensors header
    with path.open("rb") as file:
        file.seek(begin)
        yield file.read(max(0, min((tensor.start for tensor in tensors), default=0) - begin))
        for tensor in tensors:
            yield from _evenly(file, tensor.start, tensor.bytes)


def _evenly(file: BinaryIO, begin: int, size: int) -> Iterator[bytes]:
    for index in range(SAMPLES):
        file.seek(begin + size * index // SAMPLES)
        yield file.read(min(SAMPLE_BYTES, size))
