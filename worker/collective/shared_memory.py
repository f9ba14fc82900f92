"""Collectives between ranks on one host, through memory that they share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from control.errors import CollectiveFailed
from worker.collective.base import Waits
from worker.collective.native import NativeExchange

SUMMED_AS = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int64: torch.int64,
    torch.int32: torch.int64,
}
"""Half precision is summed in float32 and rounded once, whatever the number of ranks."""


class SharedMemoryCollective:
    """See Collective. Sums are taken in the order of the ranks, so every rank gets the same bits."""

    def __init__(self, exchange: NativeExchange, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self.name, self.count = rank, world_size, "shared memory", 0
        self.batch_invariant = True
        self.waits = Waits(exchange.waited_s)
        self._exchange: NativeExchange | None = exchange
        self._why_closed = CollectiveFailed("this rank has left its group")

    def all_reduce(self, tensor: Tensor) -> Tensor:
        summed_as = SUMMED_AS.get(tensor.dtype)
        if summed_as is None:
            accepted = ", ".join(map(str, SUMMED_AS))
            raise TypeError(f"tensors of {tensor.dtype} can't be summed over ranks; use one of {accepted}")
        work = tensor.to(summed_as).contiguous()
        self._carry("all_reduce", work)
        return tensor if work is tensor else tensor.copy_(work)

    def all_gather(self, tensor: Tensor) -> Tensor:
        out = tensor.new_empty((*tensor.shape[:-1], tensor.shape[-1] * self.world_size))
        self._carry("all_gather", tensor.contiguous(), out)
        return out

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        work = tensor.contiguous()
        self._carry("broadcast", work, source)
        return tensor if work is tensor else tensor.copy_(work)

    def close(self) -> None:
        """Tell the others, and give the memory back."""
        if self._exchange is not None:
            self._exchange.leave()
            self._exchange, self.waits = None, Waits()

    def _carry(self, what: str, *arguments: Any) -> None:
        self.count += 1
        if self._exchange is None:
            raise self._why_closed
        try:
            getattr(self._exchange, what)(*arguments)
        except CollectiveFailed as error:  # the ranks' rounds differ from now on
            self._why_closed = error
            self.close()
            raise
        if self.waits.fresh:
            self.waits.meet()
