"""Memory of a CPU that is zero and costs nothing until it is touched."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

LARGE_PAGE = 2 * 2**20
LEAST_SHARED = 64 * 2**10
"""Bytes from which on tensors share large pages; smaller ones are read from few pages anyway."""
_LINE = 64
_SHARED = 16 * LARGE_PAGE

_rest = torch.empty(0, dtype=torch.uint8)
_lock = threading.Lock()


def zeros(count: int, kind: torch.dtype, large: bool = True) -> Tensor:
    """`count` zeros, not written yet: torch.zeros would take 110 ms for 512 MiB. `large` asks for large pages, which
    save look-ups in sequential reads but become resident as a whole; several small tensors share one."""
    size = count * kind.itemsize
    if size < 2 * LARGE_PAGE:
        return _part(size).view(kind) if large and size >= LEAST_SHARED else torch.zeros(count, dtype=kind)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE if large else mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=kind)


def _part(size: int) -> Tensor:
    """`size` bytes of memory in large pages; it is released with the last tensor in it."""
    global _rest
    with _lock:
        if len(_rest) < size:
            _rest = large_pages(_SHARED)
        part, _rest = _rest[:size], _rest[-(-size // _LINE) * _LINE :]
        return part


def large_pages(size: int) -> Tensor:
    """`size` bytes that are zero and not written yet, from the border of a large page on, and in large pages where the
    kernel has some. Released with the last view of them."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % LARGE_PAGE
    return whole[begin : begin + size]
