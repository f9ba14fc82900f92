"""Tensors of safetensors files by name, read by the slice: a rank never holds more than its own part."""

from __future__ import annotations

import json
import mmap
import re
import struct
from collections.abc import Sequence
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from control.errors import ModelFilesError
from worker.weights.safetensors_header import image_name, text_name


class MappedFile:
    """A private mapping of `path`: no write reaches the file. It lives as long as its last view."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._resident: list[tuple[int, int]] = []
        """Intervals whose pages may be resident."""

    def view(self, start: int, size: int) -> Tensor:
        """The bytes [start, start + size) as uint8, not copied."""
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        self._resident.append((start, start + size))
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=start)

    def release(self) -> None:
        """Give back the memory of what was viewed since the last release; a view stays valid, and reads the file again.
        Nothing may have been written to it."""
        for start, stop in self._resident:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, first, stop - first)
        self._resident.clear()


IN_LAYER = re.compile(r"\blayers\.(\d+)\..*\.(?:weight|bias)$")

BARE = "embed_tokens.weight"
"""The name of the embedding in a checkpoint of a model's body alone, as models for vectors have it: without `model.`"""

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


class _File:
    """A file and its header: the type, shape and place of each tensor of the text part, and with `images` of the image
    part."""

    def __init__(self, path: Path, images: bool) -> None:
        self.path = path
        with safe_open(path, framework="pt", device="cpu"):
            pass  # it has checked the header: every place lies in the file and fits type and shape
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        self.entries = {name: entry for stored, entry in header.items() if (name := text_name(stored)) is not None}
        if images:
            self.entries |= {name: entry for stored, entry in header.items() if (name := image_name(stored))}
        self._begin = 8 + length
        self.mapped = MappedFile(path)

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file; a copy where the file's alignment is less than a number's width."""
        entry = self.entries[name]
        if entry["dtype"] not in TYPES:
            raise ModelFilesError(f"{self.path}: tensor {name} has the type {entry['dtype']}, which is not supported.")
        kind, (start, stop) = TYPES[entry["dtype"]], entry["data_offsets"]
        data = self.mapped.view(self._begin + start, stop - start)
        aligned = (self._begin + start) % kind.itemsize == 0
        return (data if aligned else data.clone()).view(kind).view(entry["shape"])


class StoredTensors(Protocol):
    """The tensors of a checkpoint, whatever its files are."""

    def __contains__(self, name: str) -> bool: ...

    @property
    def borders(self) -> tuple[int, ...]:
        """Multiples of inputs at which a rank's share of a feed-forward width may end; the largest first."""
        ...

    @property
    def read_share(self) -> float:
        """How much of it was read, 0 to 1; a tensor of which only a part is kept counts as a whole."""
        ...

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Any:
        """The tensor `name`, or only its `ranges` along `dim`, joined: a Tensor or a StoredMatrix. Raises
        ModelFilesError naming a missing one."""
        ...

    def release(self) -> None:
        """Give back the memory of what was read; its views stay valid, and read the file again."""
        ...


class Checkpoint:
    """The tensors of several files as one mapping; open only inside `with`."""

    def __init__(self, files: list[Path], images: bool = False) -> None:
        """`images`: with the tensors of the image part."""
        self._files, self._images = files, images
        self._where: dict[str, _File] = {}
        self._numbers: dict[str, int] = {}
        """The number of values of each tensor that was not read yet."""
        self._all_numbers = 0

    def __enter__(self) -> Checkpoint:
        files = list[_File]()
        for path in self._files:
            try:
                file = _File(path, self._images)
            except Exception as error:
                raise ModelFilesError(f"{path} can't be read: {error}") from error
            files.append(file)
        if any(BARE in file.entries for file in files):
            for file in files:
                file.entries = {f"model.{name}": entry for name, entry in file.entries.items()}
        for file in files:
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
        for file in set(self._where.values()):
            file.mapped.release()

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def check_read(self, layers: int, unused: Sequence[str] = ()) -> None:
        """Raise ModelFilesError naming a weight or bias of the first `layers` layers that was not read: a model without
        it computes something else. Modules named in `unused` may be stored in vain."""
        for name in sorted(self._numbers):
            found = IN_LAYER.search(name)
            if found is not None and int(found[1]) < layers and not any(f"{one}." in name for one in unused):
                raise ModelFilesError(
                    f"{self._where[name].path} holds {name}, which a model of this config.json does not have, so its "
                    "answers would be wrong. Use the config.json of these weights."
                )

    @property
    def borders(self) -> tuple[int, ...]:
        """None: a share of plain numbers may end anywhere."""
        return ()

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
