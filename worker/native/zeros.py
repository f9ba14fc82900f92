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
