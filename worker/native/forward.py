"""A model's forward in one call: embeddings and the exchange of logits are Python's, all between is C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import structlog
import torch
from torch import Tensor

from worker.collective import Collective
from worker.engine.batch import Batch
from worker.kv.base import CacheLayout
from worker.kv.slab_step import SlabStep
from worker.models.parallel import Link
from worker.native import library
from worker.native.plan import NotNative, Plan

log = structlog.get_logger()

REDUCE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class NativeForward:
    """Steps over slabs. One at a time: the memory that a step works in is kept for the next."""

    def __init__(self, plan: Plan, embed: Callable[[Tensor], Tensor], link: Link, vocab_size: int) -> None:
        self._plan, self._embed, self._link, self._vocab_size = plan, embed, link, vocab_size
        self._room = torch.empty(0, dtype=torch.uint8)
        self._model = ctypes.addressof(plan.model)

    def __call__(self, batch: Batch) -> Tensor:
        """Logits (sampled, vocabulary). Stores keys and values; raises what an exchange between ranks raised."""
        assert isinstance(batch.cache, SlabStep)
        collective = self._link.collective
        hidden = self._embed(batch.tokens)
        logits = torch.empty(batch.sampled.numel(), self._plan.head.outputs)
        spans = spans_of(batch.cache)
        reduction = _Reduction(self, collective)
        asked = library.Batch(
            spans=ctypes.addressof(spans),
            span_count=len(spans),
            positions=batch.positions.data_ptr(),
            hidden=hidden.data_ptr(),
            tokens=batch.tokens.numel(),
            sampled=batch.sampled.data_ptr(),
            sampled_count=batch.sampled.numel(),
            logits=logits.data_ptr(),
            reduce=ctypes.cast(reduction.function, ctypes.c_void_p) if collective.world_size > 1 else None,
        )
        self._run(ctypes.addressof(asked))
        if reduction.failure is not None:
            raise reduction.failure
        if collective.world_size == 1 or not logits.numel():
            return logits[:, : self._vocab_size]
        return collective.all_gather(logits)[:, : self._vocab_size]

    def _run(self, batch: int) -> int:
        threads = self._plan.threads
        needed = threads.library.furrow_step_room(threads.address, self._model, batch)
        if needed > self._room.numel():
            self._room = torch.empty(needed, dtype=torch.uint8)
        return threads.library.furrow_step(threads.address, self._model, batch, self._room.data_ptr())

    def floats(self, address: int, count: int) -> Tensor:
        """A part of the memory that the step works in."""
        begin = address - self._room.data_ptr()
        return self._room[begin : begin + 4 * count].view(torch.float32)


def native_forward(module: Any, link: Link, layout: CacheLayout, vocab_size: int) -> NativeForward | None:
    """The model's forward in C++, or None where torch runs it; the log says which, and why."""
    if layout.device.type != "cpu" or layout.dtype != torch.float32:
        return None
    try:
        plan = Plan(module, layout)
    except NotNative as reason:
        log.info("torch runs the forward", reason=str(reason))
        return None
    log.info("the forward runs in C++", threads=plan.threads.count)
    return NativeForward(plan, module.get_input_embeddings(), link, vocab_size)


class _Reduction:
    """What the step calls to sum over the ranks. An exception can't pass through it, so it is kept."""

    def __init__(self, forward: NativeForward, collective: Collective) -> None:
        self.failure: Exception | None = None
        self._forward, self._collective = forward, collective
        self.function = REDUCE(self._reduce)

    def _reduce(self, group: Any, address: int, count: int) -> int:
        try:
            self._collective.all_reduce(self._forward.floats(address, count))
        except Exception as error:
            self.failure = error
        return int(self.failure is not None)


def spans_of(step: SlabStep) -> ctypes.Array[library.Span]:
    """Where each sequence's tokens are in the batch, and its keys and values in memory."""
    spans = (library.Span * len(step.extents))()
    first = 0
    for span, extent, place in zip(spans, step.extents, step.places, strict=True):
        memory = place.pool.memory  # (layers, 2, slots, kv heads, capacity, head dim)
        layer, values, slot, head = memory.stride()[:4]
        span.keys = memory.data_ptr() + 4 * place.slot * slot
        span.values, span.layer_stride, span.head_stride = values, layer, head
        span.first, span.count, span.offset = first, extent.count, extent.offset
        first += extent.count
    return spans
