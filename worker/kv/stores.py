"""The choice of a rank's store of keys and values, and its size: slabs on a CPU, pages on a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from control.placement.need import PLAIN
from worker.kv.base import Extent, Stateless, WholeLayout

if TYPE_CHECKING:
    from worker.kv.torch.plain_attention import WholeAttention  # it imports torch
from control.host_memory import available
from worker.kv import slabs
from worker.kv.base import CacheLayout, KVStore

# The store of a model without a cache: each sequence is one row of one step, and attends to itself alone.


@dataclass(frozen=True)
class WholeStep:
    """One step's sequences."""

    layout: WholeLayout
    extents: list[Extent]

    @property
    def attention(self) -> WholeAttention:
        from worker.kv.torch.plain_attention import WholeAttention  # only here: it is torch's

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


WHOLE_TOKENS = 65_536
"""Tokens of sequences without a cache that a leader holds at a time."""


def store_for(
    layout: CacheLayout | WholeLayout, kv_tokens: int | None, max_context: int, ranks: int, *, at_most: bool = False
) -> KVStore:
    """A store of `kv_tokens`, or as many as this rank's part of the free memory holds; `ranks` share a host's memory.
    `at_most`: fewer on a GPU that has too little free memory for so many. Raises ValueError if not one block fits,
    NotMappable where a CPU can't map that much."""
    if isinstance(layout, WholeLayout):
        return WholeStore(layout, kv_tokens or max(max_context, WHOLE_TOKENS))
    if not layout.device.startswith("cuda"):
        free = available() // (2 * ranks)
        tokens = kv_tokens or slabs.mappable_tokens(layout, slabs.tokens_that_fit(free, layout), max_context)
        slabs.check_mappable(layout, tokens, max_context)
        return slabs.SlabStore(layout, tokens)
    from worker.kv.torch.stores import paged_store  # only here: slabs are numpy's, pages are torch's

    return paged_store(layout, kv_tokens, max_context, at_most=at_most)
