"""Tensors of mapped files by name, read by the slice: a rank never holds more than its own part."""

from __future__ import annotations

import mmap
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2
from numpy.typing import NDArray

from control.errors import ModelFilesError
from worker.weights.formats import StoredTensor


class MappedFile:
    """A private mapping of `path`: no write reaches the file. It lives as long as its last view."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._resident: list[tuple[int, int]] = []
        """Intervals whose pages may be resident."""

    def view(self, start: int, size: int) -> NDArray[np.uint8]:
        """The bytes [start, start + size) as uint8, not copied."""
        if not size:
            return np.empty(0, np.uint8)
        self._resident.append((start, start + size))
        return np.frombuffer(self._memory, np.uint8, count=size, offset=start)

    def release(self) -> None:
        """Give back the memory of what was viewed since the last release; a view stays valid, and reads the file again.
        Nothing may have been written to it."""
        for start, stop in self._resident:
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, first, stop - first)
        self._resident.clear()


class BlankFile(MappedFile):
    """Zeros in place of a file's bytes, which take no memory while nothing is written to them."""

    def __init__(self) -> None:
        pass

    def view(self, start: int, size: int) -> NDArray[np.uint8]:
        return np.zeros(size, np.uint8)

    def release(self) -> None:
        pass


IN_LAYER = re.compile(r"\blayers\.(\d+)\..*\.(?:weight|bias)$")

Ranges = list[tuple[int, int]]
"""Half-open intervals along one dimension, in order."""

TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(bfloat16),
    "F8_E4M3": np.dtype(float8_e4m3fn),
    "F8_E5M2": np.dtype(float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""The types of tensors by their names in safetensors files."""


class StoredTensors(Protocol):
    """The tensors of a checkpoint, whatever its files are."""

    def __contains__(self, name: str) -> bool: ...

    @property
    def borders(self) -> tuple[int, ...]:
        """Multiples of inputs at which a rank's share of a feed-forward width may end; the largest first."""
        ...

    @property
    def read_share(self) -> float:
        """The share of it that was read, 0 to 1; a tensor of which only a part is kept counts as a whole."""
        ...

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> Any:
        """The tensor `name`, or only its `ranges` along `dim`, joined: an array or a StoredMatrix. Raises
        ModelFilesError naming a missing one."""
        ...

    def release(self) -> None:
        """Give back the memory of what was read; its views stay valid, and read the file again."""
        ...


class MappedTensors:
    """Tensors of files that are mapped inside `with`."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors
        self.is_blank = False
        """True where only the shapes of what is read are those of the files."""
        self._mapped: dict[Path, MappedFile] = {}
        self._unread = {name: tensor.bytes for name, tensor in tensors.items()}
        """The bytes of each tensor that was not read yet."""
        self._all = sum(self._unread.values())

    def __enter__(self) -> Self:
        for path in {tensor.path for tensor in self._tensors.values()}:
            try:
                self._mapped[path] = MappedFile(path)
            except (OSError, ValueError) as error:
                raise ModelFilesError(f"{path} can't be read: {error}") from error
        return self

    def blank(self) -> Self:
        """Read zeros in place of the files' bytes, and open no file."""
        self.is_blank = True
        self._mapped = {tensor.path: BlankFile() for tensor in self._tensors.values()}
        return self

    @property
    def headers(self) -> Mapping[str, StoredTensor]:
        """The tensors by their names in the headers, or in the model."""
        return self._tensors

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
        self._mapped.clear()  # a file is unmapped with the last view of it

    def release(self) -> None:
        """Give back the memory of what was read; its views stay valid, and read the file again."""
        for mapped in self._mapped.values():
            mapped.release()

    @property
    def read_share(self) -> float:
        """The share of it that was read, 0 to 1; a tensor of which only a part is kept counts as a whole."""
        return 1 - sum(self._unread.values()) / max(1, self._all)

    def _data(self, place: StoredTensor, width: int) -> NDArray[np.uint8]:
        """Its bytes as a view of the mapped file; a copy where the file's alignment is less than `width`, a number's
        bytes."""
        data = self._mapped[place.path].view(place.start, place.bytes)
        return data.copy() if place.start % width else data


class Checkpoint(MappedTensors):
    """The tensors of safetensors files (safetensors_header.py) by the names that they have in the model."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def check_read(self, layers: int, unused: Sequence[str] = ()) -> None:
        """Raise ModelFilesError naming a weight or bias of the first `layers` layers that was not read: a model without
        it computes something else. Modules named in `unused` may be stored in vain."""
        for name in sorted(self._unread):
            match = IN_LAYER.search(name)
            if match is not None and int(match[1]) < layers and not any(f"{layer}." in name for layer in unused):
                raise ModelFilesError(
                    f"{self._tensors[name].path} holds {name}, which a model of this config.json does not have, so its "
                    "answers would be wrong. Use the config.json of these weights."
                )

    @property
    def borders(self) -> tuple[int, ...]:
        """None: a share of plain numbers may end anywhere."""
        return ()

    def read(self, name: str, dim: int | None = None, ranges: Ranges | None = None) -> NDArray[Any]:
        """The tensor `name`, or only its `ranges` along `dim`, joined. Raises ModelFilesError naming a missing one."""
        place = self._tensors.get(name)
        if place is None:
            folder = next((tensor.path.parent for tensor in self._tensors.values()), "?")
            raise ModelFilesError(
                f"The weights in {folder} have no tensor {name}; is this the checkpoint of its config?"
            )
        kind = TYPES.get(place.type.name)
        if kind is None:
            raise ModelFilesError(
                f"{place.path}: tensor {name} has the type {place.type.name}, which is not supported."
            )
        stored = self._data(place, kind.itemsize).view(kind).reshape(place.shape)
        self._unread.pop(name, None)
        return ranges_of(stored, dim, ranges)


def ranges_of(numbers: NDArray[Any], dim: int | None, ranges: Ranges | None) -> NDArray[Any]:
    """`ranges` of `numbers` along `dim`, joined, or all of them."""
    if dim is None or ranges is None:
        return numbers
    parts = [numbers[(slice(None),) * dim + (slice(start, stop),)] for start, stop in ranges]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim)


def checked(name: str, read: Any, shape: list[int]) -> Any:
    """`read`, the tensor or blocks of `name`. Raises ModelFilesError if it does not have `shape`."""
    if list(read.shape) != shape:
        raise ModelFilesError(
            f"Tensor {name} has the shape {list(read.shape)}, but config.json asks for {shape}; "
            "is this the checkpoint of its config?"
        )
    return read
