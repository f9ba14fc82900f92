"""The collectives of a rank group behind one small interface, so that a model never knows which backend carries them.

Every rank must call the same collectives in the same order; `count` lets a test and the operator see that they did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from control.errors import CollectiveFailed


class Collective(Protocol):
    """What a model and an engine need of their group."""

    rank: int
    world_size: int
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


class Solo:
    """A group of one: nothing to exchange, and nothing is counted."""

    def __init__(self) -> None:
        self.rank, self.world_size, self.count = 0, 1, 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor


@contextmanager
def met() -> Iterator[None]:
    """Name what a backend raises when another rank is gone: CollectiveFailed, and not this rank's own failure."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveFailed(f"a collective failed, so another rank is gone: {error}") from error


class ProcessGroupCollective:
    """Over a torch process group (gloo or NCCL), registered with torch.distributed or a bare backend object.

    The group's own methods are called instead of the functions of torch.distributed: those accept only groups of the
    process-wide registry, and a group that outlives an epoch must not be in it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self.count = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.count += 1
        with met():
            self._group.allreduce([tensor]).wait()
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        self.count += 1
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with met():
            self._group.allgather([parts], [tensor]).wait()
        return torch.cat(parts, dim=-1)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        self.count += 1
        options = dist.BroadcastOptions()
        options.rootRank = source
        with met():
            self._group.broadcast([tensor], options).wait()
        return tensor
