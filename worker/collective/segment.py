"""The memory that the ranks of one host share in an epoch: a state and two slots for each.

    0      state of rank 0, 128 bytes: published, sleepers, left (uint32 each), then at 16 the tags of the even and the
    128    state of rank 1             odd round (uint64 each), and when they were published (int64 each, ns)
    …
    4096   rank 0's slot for even rounds, rank 0's for odd ones, rank 1's for even ones, …

The memory has no name: it ends with the last process that maps it, however that ends.
"""

from __future__ import annotations

import ctypes
import mmap
import os

HEADER_BYTES = 4096
SEAT_BYTES = 128
MOST_RANKS = HEADER_BYTES // SEAT_BYTES
SLOT_BYTES = 256 * 1024
"""One round's data at most; what is larger takes several rounds. A multiple of every element's size."""


def size(world_size: int) -> int:
    return HEADER_BYTES + 2 * world_size * SLOT_BYTES


def create(world_size: int) -> int:
    """A descriptor of new shared memory, all zeros, allocated at once: a page that is missing at its first write would
    kill the process. Raises OSError without such memory, or without enough of it."""
    if not hasattr(os, "memfd_create"):
        raise OSError("this system has no memory without a name to share (memfd_create)")
    descriptor = os.memfd_create("furrow-ranks", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size(world_size))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_of(pid: int, descriptor: int) -> int:
    """A descriptor of the memory that another process has open. Raises OSError where the system forbids it."""
    return os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


class Segment:
    """One rank's mapping. It stays until nothing refers to it; `descriptor` may be closed at once."""

    def __init__(self, descriptor: int, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.memory = mmap.mmap(descriptor, size(world_size))

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


def slot_offset(rank: int, round_number: int) -> int:
    """Where in the segment the rank writes its data of that round."""
    return HEADER_BYTES + (2 * rank + round_number % 2) * SLOT_BYTES
