"""Collectives between ranks on one host, through memory that they share."""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from control.errors import CollectiveFailed, CollectiveLeft
from worker.collective.base import Abort, Numbers, Waits
from worker.detectors import COLLECTIVE_S
from worker.native import compiled

# The memory that the ranks of one host share in an epoch: a state and two slots for each.
#
#   0      state of rank 0, 128 bytes: published, sleepers, left (uint32 each), then at 16 the tags of the even and the
#   128    state of rank 1             odd round (uint64 each), and when they were published (int64 each, ns)
#   …
#   4096   rank 0's slot for even rounds, rank 0's for odd ones, rank 1's for even ones, …
#
# The memory has no name: it ends with the last process that maps it, however that ends.


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
        self.rank = rank
        self.world_size = world_size
        self.memory = mmap.mmap(descriptor, size(world_size))

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


# The other ranks' processes on this host, as descriptors (pidfds) that become readable when a process ends.
#
# Unlike a pid a descriptor is never reused, and it also tells of a process that has not been reaped.


class Peers:
    """`pids` by rank. Raises OSError where the system has no such descriptors, or a process is gone already."""

    def __init__(self, pids: list[int], rank: int) -> None:
        self.pids = pids
        self._poll = select.poll()
        self._descriptors: dict[int, int] = {}
        try:
            for peer, pid in enumerate(pids):
                if peer != rank:
                    descriptor = os.pidfd_open(pid)
                    self._descriptors[descriptor] = peer
                    self._poll.register(descriptor, select.POLLIN)
        except OSError:
            self.close()
            raise
        by_rank = {peer: descriptor for descriptor, peer in self._descriptors.items()}
        self.by_rank = (ctypes.c_int32 * len(pids))(*(by_rank.get(peer, -1) for peer in range(len(pids))))
        """The descriptors as an array by rank; -1 for this rank."""

    def ended(self) -> list[int]:
        return [self._descriptors[descriptor] for descriptor, _ in self._poll.poll(0)]

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()


# The exchanges of exchange.cpp, compiled on this host. The interpreter is free for other threads while one waits.


SOURCE = compiled.EXCHANGE
LONG_NS = 500_000_000


class _Group(ctypes.Structure):
    """As in exchange.cpp."""

    _fields_ = [
        ("base", ctypes.c_void_p),
        ("abort", ctypes.c_void_p),
        ("processes", ctypes.c_void_p),
        ("slot_bytes", ctypes.c_int64),
        ("deadline_ns", ctypes.c_int64),
        ("rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("culprit", ctypes.c_int32),
        ("round", ctypes.c_uint32),
        ("shy", ctypes.c_int32),
        ("waited_ns", ctypes.c_int64),
        ("waiting_since", ctypes.c_int64),
    ]


def library() -> ctypes.CDLL | None:
    """The compiled exchanges; None where they can't be compiled. May take a second the first time on a host."""
    loaded = compiled.load(SOURCE)
    if loaded is not None:
        group = ctypes.c_void_p
        address = ctypes.c_void_p
        number = ctypes.c_int64
        for name in ("float", "double", "int64"):
            getattr(loaded, f"furrow_reduce_{name}").argtypes = [group, address, number]
        loaded.furrow_gather.argtypes = [group, address, address, number, number]
        loaded.furrow_broadcast.argtypes = [group, address, number, ctypes.c_int32]
        loaded.furrow_leave.argtypes = [group]
        loaded.furrow_leave.restype = None
    return loaded


class NativeExchange:
    """Of contiguous arrays, through memory that the ranks share. Exchanges raise CollectiveFailed."""

    def __init__(self, segment: Segment, peers: Peers, abort: Abort, deadline_s: float = COLLECTIVE_S) -> None:
        """Raises OSError where the exchanges can't be compiled."""
        loaded = library()
        if loaded is None:
            raise OSError("the exchanges can't be compiled here")
        self._references = segment, peers, abort
        self._peers = peers
        self._abort = abort
        self._deadline_s = deadline_s
        self._group = _Group(
            base=segment.address,
            abort=abort.address,
            processes=ctypes.addressof(peers.by_rank),
            slot_bytes=SLOT_BYTES,
            deadline_ns=int(deadline_s * 1e9),
            rank=segment.rank,
            world=segment.world_size,
        )
        self._address = ctypes.addressof(self._group)
        self._reduce: dict[np.dtype[Any], Callable[[int, int], int]] = {
            np.dtype(np.float32): partial(loaded.furrow_reduce_float, self._address),
            np.dtype(np.float64): partial(loaded.furrow_reduce_double, self._address),
            np.dtype(np.int64): partial(loaded.furrow_reduce_int64, self._address),
        }
        self._gather = loaded.furrow_gather
        self._broadcast = loaded.furrow_broadcast
        self._leave = loaded.furrow_leave

    def all_reduce(self, array: NDArray[Any]) -> None:
        """Sum in place, in the order of the ranks; float32, float64 or int64."""
        outcome = self._reduce[array.dtype](array.ctypes.data, array.size)
        if outcome:
            raise self._failure(outcome)

    def all_gather(self, array: NDArray[Any], out: NDArray[Any]) -> None:
        """`array` (…, width) of every rank into `out` (…, world size × width); any type."""
        row_bytes = array.shape[-1] * array.itemsize
        rows = array.nbytes // row_bytes if row_bytes else 0
        outcome = self._gather(self._address, array.ctypes.data, out.ctypes.data, rows, row_bytes)
        if outcome:
            raise self._failure(outcome)

    def broadcast(self, array: NDArray[Any], source: int) -> None:
        """In place; any type."""
        outcome = self._broadcast(self._address, array.ctypes.data, array.nbytes, source)
        if outcome:
            raise self._failure(outcome)

    def waited_s(self) -> float:
        """Seconds for which this rank has waited for ranks that came later, a wait under way included if it is long: a
        rank that lacks a processor would count its own absence in a short one, until it sees when its peer has come.
        For any thread."""
        since_ns = self._group.waiting_since
        under_way = time.monotonic_ns() - since_ns if since_ns else 0
        return (self._group.waited_ns + (under_way if under_way > LONG_NS else 0)) / 1e9

    def leave(self) -> None:
        """Tell the others that nothing more comes from this rank."""
        self._leave(self._address)
        self._peers.close()

    def _failure(self, outcome: int) -> CollectiveFailed:
        """The outcomes of exchange.cpp in words."""
        rank = self._group.culprit
        match outcome:
            case 1:
                return CollectiveFailed(f"rank {rank} (pid {self._peers.pids[rank]}) has died")
            case 2:
                return CollectiveFailed(f"rank {rank} has left the group")
            case 3:
                return CollectiveLeft(self._abort.reason)
            case 4:
                return CollectiveFailed(f"rank {rank} did not come to a collective within {self._deadline_s:g} s")
            case _:
                return CollectiveFailed(f"rank {rank} is at another collective, or has data of another size")


SUMMED_AS = {
    np.dtype(np.float32): np.float32,
    np.dtype(np.float64): np.float64,
    np.dtype(np.float16): np.float32,
    np.dtype(ml_dtypes.bfloat16): np.float32,
    np.dtype(np.int64): np.int64,
    np.dtype(np.int32): np.int64,
}
"""Half precision is summed in float32 and rounded once, whatever the number of ranks."""


class SharedMemoryCollective:
    """See Collective. Sums are taken in the order of the ranks, so every rank gets the same bits."""

    def __init__(self, exchange: NativeExchange, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.name = "shared memory"
        self.count = 0
        self.batch_invariant = True
        self.waits = Waits(exchange.waited_s)
        self._exchange: NativeExchange | None = exchange
        self._why_closed = CollectiveFailed("this rank has left its group")

    def all_reduce(self, tensor: Numbers) -> Numbers:
        array = _array(tensor)
        summed_as = SUMMED_AS.get(array.dtype)
        if summed_as is None:
            accepted = ", ".join(map(str, SUMMED_AS))
            raise TypeError(f"numbers of {array.dtype} can't be summed over ranks; use one of {accepted}")
        work = np.ascontiguousarray(array, summed_as)
        self._carry("all_reduce", work)
        if work is not array:
            array[...] = work
        return tensor

    def all_gather(self, tensor: Numbers) -> Numbers:
        array = _array(tensor)
        out = np.empty((*array.shape[:-1], array.shape[-1] * self.world_size), array.dtype)
        self._carry("all_gather", np.ascontiguousarray(array), out)
        return cast("Numbers", out if array is tensor else _tensor(out))

    def broadcast(self, tensor: Numbers, source: int = 0) -> Numbers:
        array = _array(tensor)
        work = np.ascontiguousarray(array)
        self._carry("broadcast", work, source)
        if work is not array:
            array[...] = work
        return tensor

    def close(self) -> None:
        """Tell the others, and give the memory back."""
        if self._exchange is not None:
            self._exchange.leave()
            self._exchange, self.waits = None, Waits()

    def _carry(self, operation: str, *arguments: Any) -> None:
        self.count += 1
        if self._exchange is None:
            raise self._why_closed
        try:
            getattr(self._exchange, operation)(*arguments)
        except CollectiveFailed as error:  # the ranks' rounds differ from now on
            self._why_closed = error
            self.close()
            raise
        if self.waits.fresh:
            self.waits.meet()


def _array(numbers: Any) -> NDArray[Any]:
    """The numbers themselves, or those of a tensor over the same memory."""
    if isinstance(numbers, np.ndarray):
        return cast("NDArray[Any]", numbers)
    from worker.tensors import as_array  # it imports torch, which whoever has a tensor has done

    return as_array(numbers)


def _tensor(array: NDArray[Any]) -> Any:
    from worker.tensors import as_tensor  # as above

    return as_tensor(array)
