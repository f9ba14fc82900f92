"""The header of a GGUF file: metadata and the table of tensors.

Every count, length and offset is compared with the file before it is used, so a damaged header costs no memory. The
format is that of github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control.errors import ModelFilesAway, ModelFilesError
from worker.formats.tensor_types import REFUSED_TYPES, TENSOR_TYPES, TensorType
from worker.repository.gguf.values import Array, Cursor, read_value

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 4
MAX_NAME = 64
"""Bytes of a tensor's name, as in llama.cpp."""
MAX_KEY = 65535
DEFAULT_ALIGNMENT, MAX_ALIGNMENT = 32, 2**20
_TENSOR_END = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor's place in a file. `shape` is torch's: rows first. `start` counts from the file's beginning."""

    path: Path
    type: TensorType
    shape: tuple[int, ...]
    start: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """The metadata, a value or an Array by key, and the tensors by name."""

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]


def read_header(path: Path) -> Header:
    """Raises ModelFilesError naming file, field or tensor, and value."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                raise ModelFilesAway(f"{path} is cut short: a GGUF header takes 24 bytes, and it has {size}.")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelFilesAway(f"{path} can't be read: {error}. Repair the file system.") from error
    return parse(mapped, path)


def parse(data: bytes | mmap.mmap, path: Path) -> Header:
    """The header of a file whose content is `data`; arrays are read from `data` when they are asked for."""
    if data[:4] != MAGIC:
        raise ModelFilesError(f"{path} is not a GGUF file: it begins with {bytes(data[:4])!r}, not {MAGIC!r}.")
    cursor = Cursor(data, path, 4)
    version = cursor.number("<I", "the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        what = "is big-endian" if swapped in VERSIONS else f"has version {version}"
        raise ModelFilesError(f"{path} {what}; little-endian GGUF of version 2 or 3 is read. Convert the model again.")
    tensor_count, field_count = cursor.number("<Q", "the tensor count"), cursor.number("<Q", "the field count")
    fields = _fields(cursor, field_count)
    tensors = _tensors(cursor, tensor_count, _alignment(path, fields))
    return Header(path, fields, tensors)


def _fields(cursor: Cursor, count: int) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for index in range(cursor.fitting(count, 13, "metadata fields")):
        key = cursor.text(f"the key of field {index}", MAX_KEY)
        if key in fields:
            raise ModelFilesError(f"{cursor.path} has the field {key} twice. Download or convert it again.")
        fields[key] = read_value(cursor, key)
    return fields


def _alignment(path: Path, fields: dict[str, Any]) -> int:
    given = fields.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(given, int) or isinstance(given, bool) or not 0 < given <= MAX_ALIGNMENT or given & (given - 1):
        shown = "an array" if isinstance(given, Array) else repr(given)[:40]
        raise ModelFilesError(f"{path}: general.alignment is {shown}; a power of two up to {MAX_ALIGNMENT} is needed.")
    return given


def _tensors(cursor: Cursor, count: int, alignment: int) -> dict[str, StoredTensor]:
    path, relative = cursor.path, dict[str, tuple[TensorType, tuple[int, ...], int]]()
    for index in range(cursor.fitting(count, 32, "tensors")):
        name = cursor.text(f"the name of tensor {index}", MAX_NAME)
        if name in relative:
            raise ModelFilesError(f"{path} has the tensor {name} twice. Download or convert it again.")
        relative[name] = _tensor(cursor, name)
    begin = cursor.position + -cursor.position % alignment
    tensors: dict[str, StoredTensor] = {}
    for name, (kind, shape, offset) in relative.items():
        if offset % alignment:
            raise ModelFilesError(f"{path}: tensor {name} begins at {offset}, no multiple of {alignment}.")
        size = kind.bytes_of(shape)
        if begin + offset + size > cursor.size:
            raise ModelFilesAway(
                f"{path} is cut short or damaged: tensor {name} of shape {shape} ends at byte {begin + offset + size}, "
                f"and the file has {cursor.size}. Download it again."
            )
        tensors[name] = StoredTensor(path, kind, shape, begin + offset, size)
    _check_apart(path, tensors)
    return tensors


def _tensor(cursor: Cursor, name: str) -> tuple[TensorType, tuple[int, ...], int]:
    path = cursor.path
    rank = cursor.number("<I", f"the number of dimensions of tensor {name}")
    if not 1 <= rank <= MAX_DIMENSIONS:
        raise ModelFilesError(f"{path}: tensor {name} has {rank} dimensions; 1 to {MAX_DIMENSIONS} are possible.")
    shape = cursor.numbers(f"<{rank}Q", f"the dimensions of tensor {name}")[::-1]
    number, offset = cursor.numbers(_TENSOR_END.format, f"type and offset of tensor {name}")
    kind = TENSOR_TYPES.get(number)
    if kind is None:
        raise ModelFilesError(
            f"{path}: tensor {name} has type {REFUSED_TYPES.get(number, number)}, which is not supported. "
            f"Use a file of {', '.join(one.name.upper() for one in TENSOR_TYPES.values())}."
        )
    if 0 in shape:
        raise ModelFilesError(f"{path}: tensor {name} has the shape {shape}, with a dimension of 0.")
    if shape[-1] % kind.weights:
        raise ModelFilesError(
            f"{path}: tensor {name} has rows of {shape[-1]} weights, no multiple of the {kind.weights} in a block of "
            f"{kind.name.upper()}."
        )
    return kind, shape, offset


def _check_apart(path: Path, tensors: dict[str, StoredTensor]) -> None:
    """Two tensors never share a byte."""
    end, before = 0, ""
    for name, one in sorted(tensors.items(), key=lambda item: item[1].start):
        if one.start < end:
            raise ModelFilesError(f"{path}: the tensors {before} and {name} overlap at byte {one.start}.")
        end, before = one.start + one.bytes, name
