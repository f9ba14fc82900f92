"""The interface of a group for models and engines, with either transport.

Every rank must call the same collectives in the same order; their `count` shows it.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collective(Protocol):
    """The membership of a rank in its group. Each call raises CollectiveFailed once another rank is gone."""

    rank: int
    world_size: int
    name: str
    """The transport, which decides the order of sums; "" for a group of one."""
    batch_invariant: bool
    """True if a number's sum has the same bits in a tensor of any size."""
    count: int
    """Collectives called so far by this rank; equal on every rank between steps."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place; returns `tensor`."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate every rank's `tensor` (equal shapes) along the last dimension, in rank order."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite `tensor` with that of rank `source`, in place; returns `tensor`."""
        ...

    def close(self) -> None:
        """Leave the group; ranks that wait for this one get CollectiveFailed."""
        ...


class Solo:
    """A group of one: nothing to exchange, and nothing is counted."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.name, self.count = 0, 1, "", 0
        self.batch_invariant = True

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor

    def close(self) -> None:
        """Do nothing: no other rank waits, and the object may be used again."""
