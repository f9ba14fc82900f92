"""The exchanges of exchange.cpp, compiled on this host. The interpreter is free for other threads while one waits."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from control.errors import CollectiveFailed, CollectiveLeft
from worker.collective.abort import Abort
from worker.collective.peers import Peers
from worker.collective.segment import SLOT_BYTES, Segment
from worker.detectors import COLLECTIVE_S
from worker.native import builds, compiled

SOURCE = builds.EXCHANGE
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
        group, address, number = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64
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
        self._kept = segment, peers, abort
        self._peers, self._abort, self._deadline_s = peers, abort, deadline_s
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
        self._gather, self._broadcast, self._leave = loaded.furrow_gather, loaded.furrow_broadcast, loaded.furrow_leave

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
