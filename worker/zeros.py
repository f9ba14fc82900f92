"""Memory of a CPU that is zero and costs nothing until it is touched."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

LARGE_PAGE = 2 * 2**20


def zeros(count: int, kind: torch.dtype, touched: int | None = None) -> Tensor:
    """`count` zeros. torch.zeros writes all of them at once: 110 ms for 512 MiB, which a step would wait for.

    Large pages are asked for where the pieces that are `touched` at a time, in bytes (all, if not told), fill a good
    part of one. To look up where each small page lies takes a part of the time in which memory is read from front to
    back, but a large one is zeroed as a whole.
    """
    if count * kind.itemsize < 2 * LARGE_PAGE:
        return torch.zeros(count, dtype=kind)
    memory = mmap.mmap(-1, count * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if touched is None or touched >= LARGE_PAGE // 2:
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=kind)
