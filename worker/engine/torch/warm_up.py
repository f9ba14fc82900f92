"""The first steps of a GPU, before a request waits for them: kernels are compiled and loaded when they first run."""

from __future__ import annotations

import time

import structlog

from worker.engine.torch.graphs import BUCKETS
from worker.kv.base import KVStore
from worker.kv.torch import gathered
from worker.kv.torch.pages import PagedStore
from worker.models.served import Row, ServedModel, flatten

log = structlog.get_logger()

CHUNKS = (16, 256, 2048)
"""Tokens of the prompts that are tried: libraries multiply few and many rows by kernels of their own."""
ROWS = tuple(bucket for bucket in BUCKETS if bucket.bit_count() == 1)
"""Sequences of the decode steps that are tried: the parts of the keys, which a kernel is compiled for, are halved where
the sequences double."""


def warm_up(model: ServedModel, store: KVStore, *, captured: bool) -> None:
    """Run chunks of prompts, and decode steps unless they will be `captured`, over sequences that nobody asked for.
    What they store is given back. Every rank of the group does this at the same time."""
    if not isinstance(store, PagedStore) or store.attention is gathered.attend:
        return  # plain torch has nothing to compile
    begun = time.monotonic()
    longest = min(store.max_context, store.capacity_tokens)
    batches = [[Row(0, [0] * count, 0, True)] for count in sorted({min(count, longest) for count in CHUNKS})]
    if not captured:
        most = store.capacity_tokens // store.cost.block_tokens
        batches += [[Row(sid, [0], 0, True) for sid in range(count)] for count in ROWS if count <= most]
    for rows in batches:
        model.forward(flatten(rows, store.begin([row.extent for row in rows])))
        store.settle([])
    log.info("ran first steps", steps=len(batches), seconds=round(time.monotonic() - begun, 1), action="warm_up")
