"""A model's forward in one call: embeddings and the exchange of logits are Python's, all between is C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog
import torch
from torch import Tensor

from worker.collective import Collective
from worker.collective.link import Link
from worker.kv.base import CacheLayout
from worker.kv.slabs import SlabStep
from worker.kv.states import State
from worker.models.batch import Batch, Row
from worker.models.layers.embedding import LAYERS_TABLE
from worker.models.native.plan import Plan
from worker.models.native.unsupported import NotNative
from worker.native import library

log = structlog.get_logger()

REDUCE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class NativeForward:
    """Steps over slabs. One at a time: the memory that a step works in is kept for the next."""

    def __init__(
        self,
        plan: Plan,
        embed: Callable[[Tensor], Tensor],
        link: Link,
        vocab_size: int,
        axis_of: Tensor | None = None,
        embed_layers: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`axis_of` (head dim / 2) int32: the axis by which each frequency turns in a batch with axes. `embed_layers`:
        ids (T,) → what they give of the layers' own inputs (T, layers · width); None for a model without."""
        self._axis_of, self._embed_layers = axis_of, embed_layers
        self._plan, self._embed, self._link, self._vocab_size = plan, embed, link, vocab_size
        self._room = torch.empty(0, dtype=torch.uint8)
        self._hidden = torch.empty(0)
        self._guesses = Guesses(plan)
        self._head_alone = library.Model.from_buffer_copy(plan.model)
        self._head_alone.depth = 0

    @property
    def threads(self) -> library.Threads:
        return self._plan.threads

    @property
    def progress(self) -> int:
        """A number that changes many times in each layer of a forward; for any thread."""
        return self._plan.threads.progress

    def __call__(self, batch: Batch) -> Tensor:
        """Logits (sampled, vocabulary). Stores keys and values; raises what an exchange between ranks raised."""
        assert isinstance(batch.cache, SlabStep)
        self._hidden = self._embed(batch.tokens)
        if batch.images is not None:
            self._hidden[batch.images.places] = batch.images.rows
        inputs = None if self._embed_layers is None else self._embed_layers(batch.tokens)
        spans, slabs = places_of(batch.cache)
        reduction = _Reduction(self, self._link.collective)
        asked = library.Batch(
            spans=ctypes.addressof(spans),
            span_count=len(spans),
            slabs=ctypes.addressof(slabs),
            slab_count=len(slabs),
            positions=batch.positions.data_ptr(),
            tokens=batch.tokens.numel(),
            layer_inputs=None if inputs is None else inputs.data_ptr(),
            reduce=ctypes.cast(reduction.function, ctypes.c_void_p) if self._link.collective.world_size > 1 else None,
            ranks=self._link.collective.world_size,
        )
        if batch.cache.states:
            self._guesses.begin(asked, spans, batch.rows, batch.cache.states)
        if batch.axes is not None and self._axis_of is not None:
            asked.axes, asked.axis_of = batch.axes.data_ptr(), self._axis_of.data_ptr()
        if batch.ends is not None:
            asked.ends = batch.ends.data_ptr()
        if batch.images is not None:
            images = batch.images
            asked.marked, asked.marked_count = images.places.data_ptr(), images.places.numel()
            asked.added, asked.added_layers = images.layers.data_ptr(), len(images.layers)
        logits = self._run(self._plan.model, asked, batch.sampled)
        if reduction.failure is not None:
            raise reduction.failure
        return self._whole(logits)

    def accept(self, accepted: Mapping[int, int]) -> None:
        """Of the last step's guesses so many were right, by sequence."""
        self._guesses.accept(accepted)

    def logits_at(self, places: Tensor) -> Tensor:
        """Logits (places, vocabulary) of more of the tokens that were stepped through last."""
        return self._whole(self._run(self._head_alone, library.Batch(), places))

    def _run(self, model: library.Model, asked: library.Batch, places: Tensor) -> Tensor:
        """`asked`, and the logits that this rank has of the tokens `places`."""
        logits = torch.empty(places.numel(), self._plan.head.outputs)
        asked.hidden, asked.logits = self._hidden.data_ptr(), logits.data_ptr()
        asked.sampled, asked.sampled_count = places.data_ptr(), places.numel()
        pool, compiled = self._plan.threads.address, self._plan.threads.library
        what = ctypes.addressof(model), ctypes.addressof(asked)
        needed = compiled.furrow_step_room(pool, *what)
        if needed > self._room.numel():
            self._room = torch.empty(needed, dtype=torch.uint8)
        compiled.furrow_step(pool, *what, self._room.data_ptr())
        return logits

    def _whole(self, logits: Tensor) -> Tensor:
        collective = self._link.collective
        if collective.world_size > 1 and logits.numel():
            logits = collective.all_gather(logits)
        return logits[:, : self._vocab_size]

    def floats(self, address: int, count: int) -> Tensor:
        """A part of the memory that the step works in."""
        begin = address - self._room.data_ptr()
        return self._room[begin : begin + 4 * count].view(torch.float32)


class Guesses:
    """The inputs of recurrent layers for a step's guesses. The step leaves the states as they are before them; then
    they advance over the guesses that were right."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._memory, self._room = torch.empty(0), torch.empty(0, dtype=torch.uint8)
        self._count = 0
        self._first: dict[int, tuple[int, State]] = {}
        """Sequence → the place of its first guess among the step's, and its state."""

    def begin(
        self,
        asked: library.Batch,
        spans: ctypes.Array[library.Span],
        rows: Sequence[Row],
        states: Sequence[State],
    ) -> None:
        """Let the step `asked` keep what is needed of the guesses of `rows`, whose states are `states`."""
        self._first, self._count = {}, 0
        for row, state, span in zip(rows, states, spans, strict=False):
            if row.guesses:
                self._first[row.sid] = self._count, state
                span.guesses, span.first_guess = row.guesses, self._count
                self._count += row.guesses
        if self._count:
            needed = self._plan.threads.library.furrow_guessed_floats(ctypes.addressof(self._plan.model), self._count)
            if needed > self._memory.numel():
                self._memory = torch.empty(needed)
            asked.guessed, asked.guess_count = self._memory.data_ptr(), self._count

    def accept(self, accepted: Mapping[int, int]) -> None:
        """Advance the states over the first guesses of sequences of the last step, as many as were right."""
        right = [(sid, count) for sid, count in accepted.items() if count and sid in self._first]
        if not right:
            return
        spans = (library.Span * len(right))()
        for (sid, count), span in zip(right, spans, strict=True):
            first, state = self._first.pop(sid)
            span.first, span.count, span.state = first, count, state.memory.data_ptr()
        asked = library.Batch(spans=ctypes.addressof(spans), span_count=len(spans))
        asked.guessed, asked.guess_count = self._memory.data_ptr(), self._count
        pool, compiled = self._plan.threads.address, self._plan.threads.library
        what = ctypes.addressof(self._plan.model), ctypes.addressof(asked)
        needed = compiled.furrow_replay_room(pool, *what)
        if needed > self._room.numel():
            self._room = torch.empty(needed, dtype=torch.uint8)
        compiled.furrow_replay(pool, *what, self._room.data_ptr())


def native_forward(
    module: Any, link: Link, layout: CacheLayout, vocab_size: int, axis_of: Tensor | None = None
) -> NativeForward | None:
    """The model's forward in C++, or None where torch runs it; the log says which, and why."""
    if layout.device.type != "cpu" or layout.dtype != torch.float32:
        return None
    try:
        plan = Plan(module, layout)
    except NotNative as reason:
        log.info("torch runs the forward", reason=str(reason), action="choose_forward")
        return None
    log.info("the forward runs in C++", threads=plan.threads.count, action="choose_forward")
    embed_layers = getattr(module.base_model, LAYERS_TABLE, None)
    return NativeForward(plan, module.get_input_embeddings(), link, vocab_size, axis_of, embed_layers)


class _Reduction:
    """The callback by which the step sums over the ranks. C++ passes no exception on, so it is stored."""

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


def places_of(step: SlabStep) -> tuple[ctypes.Array[library.Span], ctypes.Array[library.Slab]]:
    """Where each sequence's tokens are in the batch, and its keys and values in memory: by sequence a slab for each of
    the layout's groups."""
    spans = (library.Span * len(step.extents))()
    slabs = (library.Slab * sum(len(slab.pool.memories) for slab in step.slabs))()
    first = place = 0
    for state, span in zip(step.states, spans, strict=False):
        span.state = state.memory.data_ptr()
    for span, extent, slab in zip(spans, step.extents, step.slabs, strict=True):
        span.slabs = place
        span.first, span.count, span.offset = first, extent.count, extent.offset
        first += extent.count
        for memory in slab.pool.memories:  # (layers, 2, slots, kv heads, capacity, head dim)
            layer, values, slot, head = memory.stride()[:4]
            slabs[place] = library.Slab(memory.data_ptr() + 4 * slab.slot * slot, values, layer, head)
            place += 1
    return spans, slabs
