"""Arrays that C++ reads: they begin at the border of a cache line, where numpy promises 16 bytes. Zeros cost nothing
until they are touched."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LARGE_PAGE = 2 * 2**20
LEAST_SHARED = 64 * 2**10
"""Bytes from which on arrays share large pages; smaller ones are read from few pages anyway."""
LINE = 64
_SHARED = 16 * LARGE_PAGE
SPARE_BYTES = 128 * 2**20
_REFERENCES = 2
"""To memory of which there is no view: the attribute, and the argument of `getrefcount`."""

_rest: NDArray[np.uint8] = np.empty(0, np.uint8)
_lock = threading.Lock()


def empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An array whose values are whatever was there; large ones are not touched."""
    kind = np.dtype(dtype)
    size = math.prod(shape if isinstance(shape, tuple) else (shape,)) * kind.itemsize
    return _from_line(np.empty(size + LINE, np.uint8), size).view(kind).reshape(shape)


def zeros(count: int, dtype: DTypeLike, large: bool = True) -> NDArray[Any]:
    """`count` zeros from the border of a cache line on, not written yet where there are many. `large` asks for large
    pages, which save look-ups in sequential reads but become resident as a whole; several small arrays share one."""
    kind = np.dtype(dtype)
    size = count * kind.itemsize
    if size < 2 * LARGE_PAGE:
        part = _part(size) if large and size >= LEAST_SHARED else _from_line(np.zeros(size + LINE, np.uint8), size)
        return part.view(kind)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE if large else mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, kind)


class Spare:
    """The memory of an array that is made again and again: it is used again as soon as nobody has the array, as
    the kernel would have to clear fresh pages. At most SPARE_BYTES are kept."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """As `empty` above."""
        kind = np.dtype(dtype)
        size = math.prod(shape) * kind.itemsize
        if size + LINE > SPARE_BYTES:
            return empty(shape, dtype)
        if len(self._memory) < size + LINE or sys.getrefcount(self._memory) > _REFERENCES:
            self._memory = np.empty(size + LINE, np.uint8)
        return _from_line(self._memory, size).view(kind).reshape(shape)


def _from_line(whole: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """`size` of the bytes `whole`, from the first border of a cache line on."""
    begin = -whole.ctypes.data % LINE
    return whole[begin : begin + size]


def _part(size: int) -> NDArray[np.uint8]:
    """`size` bytes of memory in large pages; it is released with the last array in it."""
    global _rest
    with _lock:
        if len(_rest) < size:
            _rest = large_pages(_SHARED)
        part, _rest = _rest[:size], _rest[-(-size // LINE) * LINE :]
        return part


def clear(array: NDArray[Any]) -> None:
    """Make all of `array`, which lies in one piece of private memory, zero; its whole pages go back to the kernel."""
    whole = array.reshape(-1).view(np.uint8)
    first, last = discard(array)
    whole[:first] = 0
    whole[last:] = 0


def discard(array: NDArray[Any]) -> tuple[int, int]:
    """Give the whole pages of `array`, which lies in one piece of private memory, back to the kernel; they are zero
    then. Returns the bytes [first, last) of the array that they are; both are 0 where there are none."""
    begin = array.ctypes.data
    size = array.nbytes
    first = -begin % mmap.PAGESIZE
    last = first + (size - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if last <= first or _libc.madvise(begin + first, last - first, mmap.MADV_DONTNEED):
        return 0, 0
    return first, last


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def large_pages(size: int) -> NDArray[np.uint8]:
    """`size` bytes that are zero and not written yet, from the border of a large page on, and in large pages where the
    kernel has some. Released with the last view of them."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    begin = -whole.ctypes.data % LARGE_PAGE
    return whole[begin : begin + size]


_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED = 0x10
_FAILED = ctypes.c_void_p(-1).value
_MREMAP = 1 | 2
"""MREMAP_MAYMOVE and MREMAP_FIXED of Linux."""
MOVED = 16 * LARGE_PAGE
"""Bytes that are moved to large pages at once: the memory that the move takes beside."""


def mapped(file: int, begin: int, size: int) -> NDArray[np.uint8]:
    """`size` bytes of a file from the border of a page `begin` on, mapped privately from the border of a large page on.
    Released with the last view of them. Raises OSError."""
    memory = mmap.mmap(-1, size + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(memory, np.uint8)
    first = -whole.ctypes.data % LARGE_PAGE
    address = whole.ctypes.data + first
    access = mmap.PROT_READ | mmap.PROT_WRITE
    if _libc.mmap(address, size, access, mmap.MAP_PRIVATE | _MAP_FIXED, file, begin) == _FAILED:
        raise OSError(ctypes.get_errno(), "the file can't be mapped")
    os.posix_fadvise(file, begin, size, os.POSIX_FADV_WILLNEED)  # else pages that are on the disk come one by one
    return whole[first : first + size]


def move_to_large_pages(memory: NDArray[np.uint8], pause: Callable[[], object]) -> None:
    """Replace a mapped file by equal bytes in large pages, where it lies: those who read it see no difference. `pause`
    is called between pieces of MOVED bytes. Nobody may write meanwhile. Raises OSError.

    The kernel exchanges a piece in one call; who reads it meanwhile waits in a page fault.
    """
    mremap = _libc.mremap  # Linux alone has it
    mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    mremap.restype = ctypes.c_void_p
    for start in range(0, len(memory) // mmap.PAGESIZE * mmap.PAGESIZE, MOVED):
        size = min(MOVED, len(memory) - start)
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE  # the last page of a file is mapped as a whole
        place = memory.ctypes.data + start
        room = _libc.mmap(
            None,
            size + LARGE_PAGE,
            mmap.PROT_READ | mmap.PROT_WRITE,
            mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
            -1,
            0,
        )
        if room == _FAILED:
            raise OSError(ctypes.get_errno(), "there is no memory to move weights to")
        fresh = room + -room % LARGE_PAGE
        _libc.madvise(fresh, size, mmap.MADV_HUGEPAGE)
        _libc.memcpy(fresh, place, size)
        if mremap(fresh, size, size, _MREMAP, place) == _FAILED:
            _libc.munmap(room, size + LARGE_PAGE)
            raise OSError(ctypes.get_errno(), "a piece of memory can't be moved")
        _libc.munmap(room, fresh - room)
        _libc.munmap(fresh + size, room + LARGE_PAGE - fresh)
        pause()
