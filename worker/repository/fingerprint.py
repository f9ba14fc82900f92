"""A short name for a model's weights, the same on every host that has the same files, without reading them all."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from worker.repository.files import ModelFiles, is_gguf
from worker.repository.pooling.description import pooling_of, without_places
from worker.weights.gguf import read_header

SAMPLES, SAMPLE_BYTES = 8, 32
"""Places in each tensor that are read, evenly apart, and how much at each."""


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
    config, pooling = files.config, pooling_of(files.config)
    weights = sorted(files.weights, key=lambda one: one.name)
    if pooling is not None:
        weights += [Path(dense.weights) for dense in pooling.dense]
        config = without_places(config)
    stored = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    packed = hashlib.sha256(json.dumps([config, dtype, packing], sort_keys=True).encode())
    for path in weights:
        for sample in _gguf_samples(path) if is_gguf(path) else _samples(path):
            stored.update(sample)
            packed.update(sample)
    return Fingerprints(stored.hexdigest()[:16], packed.hexdigest()[:16])


def _samples(path: Path) -> Iterator[bytes]:
    """The header of a file, and samples of its tensors."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = file.read(length)
        yield header
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            yield from _evenly(file, 8 + length + begin, end - begin)


def _gguf_samples(path: Path) -> Iterator[bytes]:
    """The header of a file, and samples of its tensors."""
    tensors = read_header(path).tensors
    with path.open("rb") as file:
        yield file.read(min((one.start for one in tensors.values()), default=0))
        for one in tensors.values():
            yield from _evenly(file, one.start, one.bytes)


def _evenly(file: BinaryIO, begin: int, size: int) -> Iterator[bytes]:
    for index in range(SAMPLES):
        file.seek(begin + size * index // SAMPLES)
        yield file.read(min(SAMPLE_BYTES, size))
