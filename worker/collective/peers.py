"""The other ranks' processes on this host, as descriptors (pidfds) that become readable when a process ends.

Unlike a pid a descriptor is never reused, and it also tells of a process that has not been reaped.
"""

from __future__ import annotations

import ctypes
import os
import select


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
