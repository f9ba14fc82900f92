"""The choice of a rank's store of keys and values, and its size: slabs on a CPU, pages on a GPU."""

from __future__ import annotations

from control.host_memory import available
from worker.kv import slabs
from worker.kv.base import CacheLayout, KVStore, WholeLayout
from worker.kv.whole import WholeStore

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
