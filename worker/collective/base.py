"""The interface of a group for models and engines, with either transport, for arrays in the host's memory and for
tensors.

Every rank must call the same collectives in the same order; their `count` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor
import ctypes

from control.errors import CollectiveLeft

Numbers = TypeVar("Numbers", NDArray[Any], "Tensor")


def sendable(numbers: NDArray[Any], device: str) -> Any:
    """`numbers` as the collectives of ranks on such devices take them: themselves, or a tensor on the device."""
    if device == "cpu":
        return numbers
    from worker.tensors import as_tensor  # only here: a CPU does without torch

    return as_tensor(numbers).to(device)


class Waits:
    """The seconds of this rank's forwards, and those of them in which it waited for other ranks.

    A forward counts from the end of its first collective on, where all ranks meet: its beginning differs between ranks
    for other reasons than their speed. One thread writes, any may read.
    """

    def __init__(self, waited_s: Callable[[], float] = lambda: 0.0) -> None:
        """`waited_s`: the time waited in all collectives, one under way included."""
        self._waited_s = waited_s
        self.fresh = False
        """True in a forward before its first collective has ended."""
        self._state: tuple[float, float, tuple[float, float] | None] = (0.0, 0.0, None)
        """Both sums of the forwards that have ended, and of one that has met the time and the waits then. One tuple:
        another thread sees all of it or nothing."""

    def begin(self) -> None:
        """A forward begins."""
        self.fresh = True

    def meet(self) -> None:
        """Its first collective has ended."""
        self.fresh = False
        self._state = (*self._state[:2], (time.monotonic(), self._waited_s()))

    def end(self) -> None:
        """It has ended, in any way."""
        self.fresh = False
        self._state = (*self.read(), None)

    def read(self) -> tuple[float, float]:
        """Seconds of forwards, and waited ones of them, of this group so far."""
        seconds, waited, met = self._state
        if met is None:
            return seconds, waited
        return seconds + time.monotonic() - met[0], waited + max(0.0, self._waited_s() - met[1])


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
    waits: Waits

    def all_reduce(self, tensor: Numbers) -> Numbers:
        """Sum over all ranks, in place; returns `tensor`."""
        ...

    def all_gather(self, tensor: Numbers) -> Numbers:
        """Concatenate every rank's `tensor` (equal shapes) along the last dimension, in rank order."""
        ...

    def broadcast(self, tensor: Numbers, source: int = 0) -> Numbers:
        """Overwrite `tensor` with that of rank `source`, in place; returns `tensor`."""
        ...

    def close(self) -> None:
        """Leave the group; ranks that wait for this one get CollectiveFailed."""
        ...


class Solo:
    """A group of one: nothing to exchange, and nothing is counted."""

    def __init__(self) -> None:
        self.rank = 0
        self.world_size = 1
        self.name = ""
        self.count = 0
        self.batch_invariant, self.waits = True, Waits()

    def all_reduce(self, tensor: Numbers) -> Numbers:
        return tensor

    def all_gather(self, tensor: Numbers) -> Numbers:
        return tensor

    def broadcast(self, tensor: Numbers, source: int = 0) -> Numbers:
        return tensor

    def close(self) -> None:
        """Do nothing: no other rank waits, and the object may be used again."""


class Link:
    """The group that a model's modules talk through; exchanged as one when a new epoch joins a new group."""

    def __init__(self, collective: Collective) -> None:
        self.collective = collective


# How another thread gets a rank's main thread out of a wait for its peers.


class Abort:
    """One epoch's word to leave. It stands once said: a new epoch has an Abort of its own."""

    def __init__(self) -> None:
        self._said = ctypes.c_int32(0)
        self.reason = ""

    def say(self, reason: str) -> None:
        """Leave, and wait for nobody again. From any thread; the first reason stands."""
        if not self._said.value:
            self.reason = reason
            self._said.value = 1

    @property
    def said(self) -> bool:
        return bool(self._said.value)

    @property
    def address(self) -> int:
        """Of an int32 that is not 0 once said, for who looks from outside the interpreter."""
        return ctypes.addressof(self._said)

    def check(self) -> None:
        """Raise CollectiveLeft once said."""
        if self.said:
            raise CollectiveLeft(self.reason)
