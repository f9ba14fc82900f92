"""Collectives between ranks on one host, through memory that they share."""

from __future__ import annotations

from typing import Any, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from control.errors import CollectiveFailed
from worker.collective.base import Numbers, Waits
from worker.collective.native import NativeExchange

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
        self.rank, self.world_size, self.name, self.count = rank, world_size, "shared memory", 0
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


def _array(numbers: Any) -> NDArray[Any]:
    """The numbers themselves, or those of a tensor over the same memory."""
    if isinstance(numbers, np.ndarray):
        return cast("NDArray[Any]", numbers)
    from worker.tensors import as_array  # it imports torch, which whoever has a tensor has done

    return as_array(numbers)


def _tensor(array: NDArray[Any]) -> Any:
    from worker.tensors import as_tensor  # as above

    return as_tensor(array)
