"""Decode steps as CUDA graphs: one launch per step instead of hundreds, collectives included.

There is one graph for each of a few batch sizes (buckets), over buffers that are filled before the launch. A smaller
batch is padded with rows that own nothing. The bucket depends only on the batch, which is equal on all ranks. A graph
holds its communicator's collectives, so it is released before the communicator and captured again in the next epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import structlog
import torch
from torch import Tensor

from worker.kv.base import Extent, KVStore
from worker.kv.torch import plain_attention
from worker.kv.torch.pages import PagedBatch, PagedStep, PagedStore
from worker.models.served import Batch, Row, ServedModel, flatten
from worker.selftest import switches

log = structlog.get_logger()


BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Batch sizes of the graphs. They are close: filling up costs less than launching step by step."""

FILLING = (0, 0, -1)
"""Token, position and table row of an empty row that fills up a bucket."""


class Graph(Protocol):
    """Launch the captured work."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]
"""Records what the work launches, without running it."""


class CudaCapture:
    """Captures on a stream of its own; all graphs share one pool of memory, as only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # Other threads go on: NCCL's watchdog asks for events, which the default mode would take for an error.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph


class RefusedCapture:
    """Captures nothing, on a rank whose peers may capture: their runs before a capture need it all the same."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __call__(self, work: Callable[[], None]) -> Graph:
        raise RuntimeError(self._reason)


class DecodeGraphs:
    """The captured decode steps of one model over one store."""

    def __init__(
        self, model: ServedModel, store: PagedStore, capture: Capture, buckets: tuple[int, ...] = BUCKETS
    ) -> None:
        self._model = model
        self._store = store
        self._capture = capture
        self.buckets = buckets
        largest = buckets[-1]
        device = torch.device(model.device)
        self._inputs = torch.zeros(len(FILLING) * largest, dtype=torch.int64, device=device)
        self._sampled = torch.arange(largest, device=device)
        dtype = torch.float64 if model.dtype == np.float64 else torch.float32
        # Outside of the graphs' pool: kept inside, each bucket would hold logits of its own.
        self._logits = torch.zeros(largest, model.vocab_size, dtype=dtype, device=device)
        self._graphs: dict[int, Graph] = {}
        self._collectives: dict[int, int] = {}
        """The number of collectives in a replay, by bucket."""
        self._tables: Tensor | None = None

    def prepare(self) -> None:
        """Capture every bucket. If that fails on any rank the graphs stay empty on all, and kernels are launched one by
        one: a bucket's collectives are larger than those of its rows. All buckets are run before any is captured,
        because peers take part in a run; a failed capture keeps no peer waiting."""
        self.release()
        begun = time.monotonic()
        for bucket in self.buckets:
            self._fill(bucket, [])
            self._work(bucket)()
        try:
            for bucket in reversed(self.buckets):
                before = self._model.collective.count
                self._graphs[bucket] = self._capture(self._work(bucket))
                self._collectives[bucket] = self._model.collective.count - before
            failure = ""
        except RuntimeError as error:
            failure = str(error) or type(error).__name__
        if not self._all_captured(not failure):
            self.release()
            reason = failure or "another rank could not capture them"
            log.warning("decode steps not captured", reason=reason, action="capture")
            return
        self._tables = self._store.tables
        seconds = round(time.monotonic() - begun, 1)
        log.info("captured the decode steps", buckets=len(self.buckets), seconds=seconds, action="capture")

    def _all_captured(self, captured: bool) -> bool:
        """True if every rank of the group has captured its steps."""
        collective = self._model.collective
        if collective.world_size == 1:
            return captured
        votes = torch.tensor([int(captured)], dtype=torch.int64, device=self._model.device)
        return int(collective.all_reduce(votes).item()) == collective.world_size

    def release(self) -> None:
        """Give the graphs up; needed before their communicator is destroyed."""
        self._graphs.clear()
        self._collectives.clear()
        self._tables = None

    def takes(self, rows: list[Row]) -> bool:
        """True if `rows` are a decode step that was captured: one token each, all of them sampled."""
        return (
            0 < len(rows) <= max(self._graphs, default=0)
            and self._tables is self._store.tables
            and all(row.sample and len(row.tokens) == 1 and not row.scored for row in rows)
        )

    def bucket(self, count: int) -> int:
        """The smallest that holds `count` rows."""
        return next(bucket for bucket in self.buckets if bucket >= count)

    @property
    def max_context(self) -> int:
        """Positions that a sequence can have."""
        return self._store.max_context

    def run(self, rows: list[Row], tokens: Tensor | None = None) -> Tensor:
        """Logits (rows, vocabulary), valid until the next run. Keys and values are stored, and committed by the caller.
        `tokens` (rows) on the device replace those of `rows`; one below 0 stands for none."""
        owners = self._store.reserve([row.extent for row in rows])
        bucket = self.bucket(len(rows))
        self._fill(bucket, [(row.tokens[0], row.offset, owner) for row, owner in zip(rows, owners, strict=True)])
        if tokens is not None:
            self._views(bucket)[0, : len(rows)].copy_(tokens.clamp(min=0))
        self._graphs[bucket].replay()
        self._model.collective.count += self._collectives[bucket]
        return self._logits[: len(rows)]

    def settle(self, extents: list[Extent]) -> None:
        """Of the step that was run last only `extents` will be committed."""
        self._store.settle(extents)

    def _fill(self, bucket: int, rows: list[tuple[int, int, int]]) -> None:
        filled = rows + [FILLING] * (bucket - len(rows))
        inputs = torch.tensor(filled, dtype=torch.int64).t().contiguous()
        self._views(bucket).copy_(inputs, non_blocking=True)

    def _views(self, bucket: int) -> Tensor:
        """(3, bucket): tokens, positions, owners. Dense for every bucket, so that one copy fills it."""
        return self._inputs[: len(FILLING) * bucket].view(len(FILLING), bucket)

    def _work(self, bucket: int) -> Callable[[], None]:
        tokens, positions, owners = self._views(bucket)
        places = PagedBatch(
            tables=self._store.tables, owners=owners, positions=positions, singles=self._sampled[:bucket]
        )
        batch = Batch(tokens, positions, self._sampled[:bucket], PagedStep(self._store, places))
        logits = self._logits[:bucket]

        @torch.inference_mode()
        def work() -> None:
            logits.copy_(self._model.forward(batch))

        return work


def graphs_for(model: ServedModel, store: KVStore) -> DecodeGraphs | None:
    """Graphs where decode steps can be captured: on a GPU, without waiting for the device in between."""
    if not model.device.startswith("cuda") or not isinstance(store, PagedStore) or model.dtype == np.float64:
        return None
    if model.waits_for_device:
        log.info("decode steps not captured", reason="the chosen experts are read from the device", action="capture")
        return None
    reason = switches.reason_off("graphs")
    if store.attention is plain_attention.attend:
        reason = "attention runs without its kernels, and waits for the device"
    if reason is None:
        return DecodeGraphs(model, store, CudaCapture(torch.device(model.device)))
    if model.collective.world_size > 1:
        return DecodeGraphs(model, store, RefusedCapture(reason))
    log.warning("decode steps not captured", reason=reason, action="capture")
    return None


# The first steps of a GPU, before a request waits for them: kernels are compiled and loaded when they first run.


CHUNKS = (16, 256, 2048)
"""Tokens of the prompts that are tried: libraries multiply few and many rows by kernels of their own."""
ROWS = tuple(bucket for bucket in BUCKETS if bucket.bit_count() == 1)
"""Sequences of the decode steps that are tried: the parts of the keys, which a kernel is compiled for, are halved where
the sequences double."""


def warm_up(model: ServedModel, store: KVStore, *, captured: bool) -> None:
    """Run chunks of prompts, and decode steps unless they will be `captured`, over sequences that nobody asked for.
    What they store is given back. Every rank of the group does this at the same time."""
    if not isinstance(store, PagedStore) or store.attention is plain_attention.attend:
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
