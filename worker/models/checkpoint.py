"""Tensors of safetensors files by name, read by the slice: a rank never holds more than its own part."""

from __future__ import annotations

import json
import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from control.errors import ModelFilesError

Ranges = list[tuple[int, int]]
"""Half-open intervals along one dimension, in order."""

TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The types of tensors by their names in safetensors files."""


@dataclass
class _File:
    """A mapped file: its pages are those of the page cache, and this process's only while it reads them."""

    path: Path
    entries: dict[str, Any] = field(default_factory=dict)
    """The header: type, shape and place of each tensor."""
    begin: int = 0
    """Where the data begins."""
    memory: mmap.mmap | None = None

    def open(self) -> None:
        with safe_open(self.path, framework="pt", device="cpu"):
            pass  # it has checked the header: every place lies in the file and fits type and shape
        with self.path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self.entries, self.begin = json.loads(file.read(length)), 8 + length
            self.entries.pop("__metadata__", None)
            # A private mapping, which torch may take for memory to write to; no write reaches the file.
            self.memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file."""
        assert self.memory is not None
        entry = self.entries[name]
        if entry["dtype"] not in TYPES:
            raise ModelFilesError(f"{self.path}: tensor {name} has the type {entry['dtype']}, which is not supported.")
        kind, count = TYPES[entry["dtype"]], prod(entry["shape"])
        if not count:
            return torch.empty(entry["shape"], dtype=kind)
        offset = self.begin + entry["data_offsets"][0]
        return torch.frombuffer(self.memory, dtype=kind, count=count, offset=offset).view(entry["shape"])

    def release(self, name: str) -> None:
        """Unmap the pages of a tensor until they are read again."""
        assert self.memory is not None
        start, stop = (self.begin + place for place in self.entries[name]["data_offsets"])
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > first:
            self.memory.madvise(mmap.MADV_DONTNEED, first, stop - first)


class StoredTensors(Protocol):
    """The tensors of a checkpoint, whatever its files are."""

    def __contains__(self, name: str) -> bool: ...

    def release(self) -> None:
        """Give back the memory of what was read; its views stay valid, and read the file again."""
        ...

    @property
    def read_share(self) -> float:
        """How much of it was read, 0 to 1; a tensor of which only a part is kept counts as a whole."""
        ...

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Any:
        """The tensor `name`, or only its `ranges` along `dim`, joined: a Tensor or Blocks. Raises ModelFilesError
        naming a missing one."""
        ...


class Checkpoint:
    """The tensors of several files as one mapping; open only inside `with`."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._where: dict[str, _File] = {}
        self._resident: set[str] = set()
        """The tensors whose pages may be resident."""
        self._numbers: dict[str, int] = {}
        """The number of values of each tensor that was not read yet."""
        self._all_numbers = 0

    def __enter__(self) -> Checkpoint:
        for path in self._files:
            file = _File(path)
            try:
                file.open()
            except Exception as error:
                raise ModelFilesError(f"{path} can't be read: {error}") from error
            self._where.update(dict.fromkeys(file.entries, file))
        self._numbers = {name: prod(file.entries[name]["shape"]) for name, file in self._where.items()}
        self._all_numbers = sum(self._numbers.values())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        self._where.clear()  # a file is unmapped with the last view of it

    def release(self) -> None:
        """Give back the memory of what was read; its views stay valid, and read the file again."""
        for name in self._resident:
            self._where[name].release(name)
        self._resident.clear()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    @property
    def read_share(self) -> float:
        """How much of it was read, 0 to 1; a tensor of which only a part is kept counts as a whole."""
        return 1 - sum(self._numbers.values()) / max(1, self._all_numbers)

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Tensor:
        """The tensor `name`, or only its `ranges` along `dim`, joined. Raises ModelFilesError naming a missing one."""
        if name not in self._where:
            folder = self._files[0].parent if self._files else "?"
            raise ModelFilesError(
                f"The weights in {folder} have no tensor {name}; is this the checkpoint of its config?"
            )
        stored = self._where[name].tensor(name)
        self._resident.add(name)
        self._numbers.pop(name, None)
        if dim is None or ranges is None:
            return stored
        parts = [stored[(slice(None),) * dim + (slice(start, stop),)] for start, stop in ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def checked(name: str, read: Any, shape: list[int]) -> Any:
    """`read`, the tensor or blocks of `name`. Raises ModelFilesError if it does not have `shape`."""
    if list(read.shape) != shape:
        raise ModelFilesError(
            f"Tensor {name} has the shape {list(read.shape)}, but config.json asks for {shape}; "
            "is this the checkpoint of its config?"
        )
    return read
