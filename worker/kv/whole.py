"""The store of a model without a cache: each sequence is one row of one step, and attends to itself alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from control.placement.need import PLAIN
from worker.kv.base import Extent, Stateless, WholeLayout

if TYPE_CHECKING:
    from worker.kv.torch.whole_attention import WholeAttention  # it imports torch


@dataclass(frozen=True)
class WholeStep:
    """One step's sequences."""

    layout: WholeLayout
    extents: list[Extent]

    @property
    def attention(self) -> WholeAttention:
        from worker.kv.torch.whole_attention import WholeAttention  # only here: it is torch's

        return WholeAttention(self.layout, self.extents)


class WholeStore(Stateless):
    """The lengths of the sequences, and no memory: a row is computed at once, and never continued."""

    supports_prefix_sharing = False
    cost = PLAIN

    def __init__(self, layout: WholeLayout, capacity_tokens: int) -> None:
        self._layout = layout
        self.capacity_tokens = capacity_tokens
        self._lengths: dict[int, int] = {}

    @property
    def used_tokens(self) -> int:
        return sum(self._lengths.values())

    def rounded(self, tokens: int) -> int:
        return tokens

    def length(self, sid: int) -> int | None:
        return self._lengths.get(sid)

    def begin(self, extents: list[Extent], beside: Iterable[Extent] = ()) -> WholeStep:
        if any(extent.offset for extent in extents):
            raise RuntimeError("this model computes a sequence in one row, and the row does not begin at its start")
        return WholeStep(self._layout, extents)

    def commit(self, extents: list[Extent]) -> None:
        self._lengths.update({extent.sid: extent.end for extent in extents})

    def fork(self, sid: int, donor: int, count: int, *, take_over: bool, snapshots: bool = False) -> None:
        raise RuntimeError("this model has no cache that another sequence could begin with")

    def drop(self, sid: int) -> None:
        self._lengths.pop(sid, None)

    def clear(self) -> None:
        self._lengths.clear()
