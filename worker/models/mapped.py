"""Files of weights, mapped: their pages are those of the page cache, and a process's only while it reads them."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor


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
