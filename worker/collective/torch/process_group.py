"""Collectives over a process group of torch: gloo between hosts, NCCL between GPUs."""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from control.errors import CollectiveFailed
from worker.collective.base import Numbers, Waits
from worker.tensors import as_array, as_tensor


@contextmanager
def met() -> Generator[None]:
    """Name what a backend raises when another rank is gone: CollectiveFailed, and not this rank's own failure."""
    try:
        yield
    except RuntimeError as error:
        raise CollectiveFailed(f"a collective failed, so another rank is gone: {error}") from error


_torch: Any = dist
"""Stores are not in its __all__."""


def listen(address: str) -> tuple[Any, int]:
    """torch's store for a group that meets at this process, and its port at `address`."""
    listener = socket.create_server((address, 0), backlog=128)
    port: int = listener.getsockname()[1]
    descriptor = listener.detach()
    return _torch.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor), port


def reach(place: str, patience: timedelta) -> Any:
    """torch's store at `place`, host:port."""
    host, _, port = place.rpartition(":")
    return _torch.TCPStore(host, int(port), is_master=False, timeout=patience)


class _Clock:
    """The time that one thread spends in collectives. It refers to no group, which must end with its epoch."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._since = 0.0

    @contextmanager
    def running(self) -> Generator[None]:
        self._since = begun = time.monotonic()
        try:
            yield
        finally:
            self._since = 0.0
            self._seconds += time.monotonic() - begun

    def read(self) -> float:
        """Seconds so far, for any thread."""
        since = self._since
        return self._seconds + (time.monotonic() - since if since else 0.0)


class ProcessGroupCollective:
    """Over a torch process group (gloo or NCCL), registered with torch.distributed or a bare backend object. The
    group's own methods are called, because torch.distributed's functions accept only registered groups, which must not
    outlive an epoch."""

    def __init__(self, group: dist.ProcessGroup, name: str = "gloo", store: Any = None) -> None:
        """`store` is where the ranks met."""
        self._group = group
        self.name = name
        self.store = store
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        # A ring sums in an order that follows from a number's place in the tensor; with two ranks both are equal.
        self.batch_invariant = self.world_size <= 2
        self.count = 0
        self._clock = _Clock()
        self.waits = Waits(self._clock.read) if name == "gloo" else Waits()

    def all_reduce(self, tensor: Numbers) -> Numbers:
        with self._counted():
            self._group.allreduce([_tensor(tensor)]).wait()
        return tensor

    def all_gather(self, tensor: Numbers) -> Numbers:
        contribution = _tensor(tensor).contiguous()
        parts = [torch.empty_like(contribution) for _ in range(self.world_size)]
        with self._counted():
            self._group.allgather([parts], [contribution]).wait()
        whole = torch.cat(parts, dim=-1)
        return cast("Numbers", as_array(whole) if isinstance(tensor, np.ndarray) else whole)

    def broadcast(self, tensor: Numbers, source: int = 0) -> Numbers:
        options = dist.BroadcastOptions()
        options.rootRank = source
        with self._counted():
            self._group.broadcast([_tensor(tensor)], options).wait()
        return tensor

    @contextmanager
    def _counted(self) -> Generator[None]:
        """Run one collective. Over gloo a wait and the transfer are one time; with NCCL the host measures neither."""
        self.count += 1
        with self._clock.running(), met():
            yield
        if self.waits.fresh:
            self.waits.meet()

    def close(self) -> None:
        """Close the sockets, which is what tells the others."""
        if dist.is_initialized() and self._group is dist.group.WORLD:
            dist.destroy_process_group()


def _tensor(numbers: Any) -> Tensor:
    """The numbers themselves, or a tensor over the memory of an array."""
    return as_tensor(cast("Any", numbers)) if isinstance(numbers, np.ndarray) else numbers


class HostCollective(ProcessGroupCollective):
    """Between GPUs without NCCL: tensors go through the host's memory, over gloo. Slow, and never inside a graph."""

    def all_reduce(self, tensor: Any) -> Any:
        return tensor.copy_(super().all_reduce(tensor.cpu()))

    def all_gather(self, tensor: Any) -> Any:
        return super().all_gather(tensor.cpu()).to(tensor.device)

    def broadcast(self, tensor: Any, source: int = 0) -> Any:
        return tensor.copy_(super().broadcast(tensor.cpu(), source))


def join_group(
    store: Any, rank: int, world_size: int, backend: str, limit: timedelta, through_host: bool
) -> ProcessGroupCollective:
    """Join the group that meets at torch's `store`; `backend` is gloo or nccl. Raises RuntimeError if another rank does
    not come within `limit`."""
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
    kind = HostCollective if through_host else ProcessGroupCollective
    return kind(cast(dist.ProcessGroup, dist.group.WORLD), backend, store)
