"""The transport of a group on one host: its interface, for the compiled and the interpreted one, and its errors."""

from __future__ import annotations

import time
from typing import Protocol

from torch import Tensor

from control.errors import CollectiveFailed, CollectiveLeft
from worker.collective.abort import Abort
from worker.collective.peers import Peers

LONG_NS = 500_000_000


class Exchange(Protocol):
    """Contiguous tensors on the CPU. Raises CollectiveFailed."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum in place, in the order of the ranks; float32, float64 or int64."""
        ...

    def all_gather(self, tensor: Tensor, out: Tensor) -> None:
        """`tensor` (…, width) of every rank into `out` (…, world size × width); any type."""
        ...

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """In place; any type."""
        ...

    def waited_s(self) -> float:
        """Seconds for which this rank has waited for ranks that came later, a wait under way included. For any
        thread."""
        ...

    def leave(self) -> None:
        """Tell the others that nothing more comes from this rank."""
        ...


def waited_s(ended_ns: int, since_ns: int) -> float:
    """Seconds in the waits that have ended, and in one that began at `since_ns` (0: none) if it is long: a rank that
    lacks a processor would count its own absence in a short one, until it sees when its peer has come."""
    under_way = time.monotonic_ns() - since_ns if since_ns else 0
    return (ended_ns + (under_way if under_way > LONG_NS else 0)) / 1e9


def dead(peers: Peers, rank: int) -> CollectiveFailed:
    return CollectiveFailed(f"rank {rank} (pid {peers.pids[rank]}) has died")


def left(rank: int) -> CollectiveFailed:
    return CollectiveFailed(f"rank {rank} has left the group")


def aborted(abort: Abort) -> CollectiveFailed:
    return CollectiveLeft(abort.reason)


def late(rank: int, seconds: float) -> CollectiveFailed:
    return CollectiveFailed(f"rank {rank} did not come to a collective within {seconds:g} s")


def astray(rank: int) -> CollectiveFailed:
    return CollectiveFailed(f"rank {rank} is at another collective, or has data of another size")
