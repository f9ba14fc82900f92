"""Memory of a CPU that is zero and costs nothing until it is touched."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 * 2**20


def zeros(count: int, kind: torch.dtype, large: bool = True) -> Tensor:
    """`count` zeros, not written yet: torch.zeros would take 110 ms for 512 MiB. `large` asks for large pages, which
    save look-ups in sequential reads but become resident as a whole."""
    if count * kind.itemsize < 2 * LARGE_PAGE:
        return torch.zeros(count, dtype=kind)
    memory = mmap.mmap(-1, count * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE if large else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=kind)


def large_pages(size: int) -> Tensor:
    """`size` bytes that are zero and not written yet, from the border of a large page on, and in large pages where the
    kernel has some. Released with the last view of them."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % LARGE_PAGE
    return whole[begin : begin + size]
