"""A model's forward in one call: embeddings and the exchange of logits are Python's, all between is C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from worker.collective import Collective
from worker.collective.base import Link
from worker.kv.base import CacheLayout
from worker.kv.slabs import SlabStep
from worker.kv.states import State
from worker.models.batch import Batch, Row
from worker.models.native.module import NotNative
from worker.models.native.modules import LAYERS_TABLE
from worker.models.native.plan import Plan
from worker.native import library
from worker.native.memory import empty

log = structlog.get_logger()

Array = NDArray[Any]

REDUCE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class NativeForward:
    """Steps over slabs. One at a time: the memory that a step works in is kept for the next."""

    def __init__(
        self,
        plan: Plan,
        embed: Callable[[Array], Array],
        link: Link,
        vocab_size: int,
        axis_of: Array | None = None,
        embed_layers: Callable[[Array], Array] | None = None,
    ) -> None:
        """`axis_of` (head dim / 2) int32: the axis by which each frequency turns in a batch with axes. `embed_layers`:
        ids (T,) → what they give of the layers' own inputs (T, layers · width); None for a model without."""
        self._axis_of = axis_of
        self._embed_layers = embed_layers
        self._plan = plan
        self._embed = embed
        self._link = link
        self._vocab_size = vocab_size
        self._room = empty(0, np.uint8)
        self._hidden = empty(0, np.float32)
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

    @property
    def kernels(self) -> str:
        """What the bits of its products depend on."""
        return self._plan.threads.kernels

    def __call__(self, batch: Batch) -> Array:
        """Logits (sampled, vocabulary). Stores keys and values; raises what an exchange between ranks raised."""
        assert isinstance(batch.cache, SlabStep)
        images = batch.images
        self._hidden = self._embed(batch.tokens)
        if images is not None:
            self._hidden[images.places] = images.rows
        inputs = None if self._embed_layers is None else self._embed_layers(batch.tokens)
        spans, slabs = places_of(batch.cache)
        reduction = _Reduction(self, self._link.collective)
        struct = library.Batch(
            spans=ctypes.addressof(spans),
            span_count=len(spans),
            slabs=ctypes.addressof(slabs),
            slab_count=len(slabs),
            positions=batch.positions.ctypes.data,
            tokens=batch.tokens.size,
            layer_inputs=None if inputs is None else inputs.ctypes.data,
            reduce=ctypes.cast(reduction.function, ctypes.c_void_p) if self._link.collective.world_size > 1 else None,
            ranks=self._link.collective.world_size,
        )
        if batch.cache.states:
            self._guesses.begin(struct, spans, batch.rows, batch.cache.states)
        if batch.axes is not None and self._axis_of is not None:
            struct.axes = batch.axes.ctypes.data
            struct.axis_of = self._axis_of.ctypes.data
        if batch.ends is not None:
            struct.ends = batch.ends.ctypes.data
        if images is not None:
            struct.marked = images.places.ctypes.data
            struct.marked_count = images.places.size
            struct.added = images.layers.ctypes.data
            struct.added_layers = len(images.layers)
        logits = self._run(self._plan.model, struct, batch.sampled)
        if reduction.failure is not None:
            raise reduction.failure
        return self._whole(logits)

    def accept(self, accepted: Mapping[int, int]) -> None:
        """Of the last step's guesses so many were right, by sequence."""
        self._guesses.accept(accepted)

    def logits_at(self, places: Array) -> Array:
        """Logits (places, vocabulary) of more of the tokens that were stepped through last."""
        return self._whole(self._run(self._head_alone, library.Batch(), places))

    def _run(self, model: library.Model, batch: library.Batch, places: Array) -> Array:
        """Run `batch`; the logits that this rank has of the tokens `places`."""
        logits = empty((places.size, self._plan.head.outputs), np.float32)
        batch.hidden = self._hidden.ctypes.data
        batch.logits = logits.ctypes.data
        batch.sampled = places.ctypes.data
        batch.sampled_count = places.size
        pool = self._plan.threads.address
        compiled = self._plan.threads.library
        what = ctypes.addressof(model), ctypes.addressof(batch)
        needed = compiled.furrow_step_room(pool, *what)
        if needed > self._room.size:
            self._room = empty(needed, np.uint8)
        compiled.furrow_step(pool, *what, self._room.ctypes.data)
        return logits

    def _whole(self, logits: Array) -> Array:
        collective = self._link.collective
        if collective.world_size > 1 and logits.size:
            logits = collective.all_gather(logits)
        return logits[:, : self._vocab_size]

    def floats(self, address: int, count: int) -> Array:
        """A part of the memory that the step works in."""
        begin = address - self._room.ctypes.data
        return self._room[begin : begin + 4 * count].view(np.float32)


class Guesses:
    """The inputs of recurrent layers for a step's guesses. The step leaves the states as they are before them; then
    they advance over the guesses that were right."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._memory = empty(0, np.float32)
        self._room = empty(0, np.uint8)
        self._count = 0
        self._first: dict[int, tuple[int, State]] = {}
        """Sequence → the place of its first guess among the step's, and its state."""

    def begin(
        self,
        batch: library.Batch,
        spans: ctypes.Array[library.Span],
        rows: Sequence[Row],
        states: Sequence[State],
    ) -> None:
        """Let the step `batch` keep what is needed of the guesses of `rows`, whose states are `states`."""
        self._first = {}
        self._count = 0
        for row, state, span in zip(rows, states, spans, strict=False):
            if row.guesses:
                self._first[row.sid] = self._count, state
                span.guesses = row.guesses
                span.first_guess = self._count
                self._count += row.guesses
        if self._count:
            needed = self._plan.threads.library.furrow_guessed_floats(ctypes.addressof(self._plan.model), self._count)
            if needed > self._memory.size:
                self._memory = empty(needed, np.float32)
            batch.guessed = self._memory.ctypes.data
            batch.guess_count = self._count

    def accept(self, accepted: Mapping[int, int]) -> None:
        """Advance the states over the first guesses of sequences of the last step, as many as were right."""
        right = [(sid, count) for sid, count in accepted.items() if count and sid in self._first]
        if not right:
            return
        spans = (library.Span * len(right))()
        for (sid, count), span in zip(right, spans, strict=True):
            first, state = self._first.pop(sid)
            span.first = first
            span.count = count
            span.state = state.memory.ctypes.data
        batch = library.Batch(spans=ctypes.addressof(spans), span_count=len(spans))
        batch.guessed = self._memory.ctypes.data
        batch.guess_count = self._count
        pool = self._plan.threads.address
        compiled = self._plan.threads.library
        what = ctypes.addressof(self._plan.model), ctypes.addressof(batch)
        needed = compiled.furrow_replay_room(pool, *what)
        if needed > self._room.size:
            self._room = empty(needed, np.uint8)
        compiled.furrow_replay(pool, *what, self._room.ctypes.data)


def native_forward(
    module: Any, link: Link, layout: CacheLayout, vocab_size: int, axis_of: Array | None = None
) -> NativeForward | None:
    """The model's forward in C++, or None where torch runs it; the log says which, and why."""
    try:
        plan = Plan(module, layout)
    except NotNative as reason:
        log.info("torch runs the forward", reason=str(reason), action="choose_forward")
        return None
    log.info("the forward runs in C++", threads=plan.threads.count, action="choose_forward")
    embed_layers = getattr(module.model, LAYERS_TABLE, None)
    return NativeForward(plan, module.model.embed_tokens, link, vocab_size, axis_of, embed_layers)


class _Reduction:
    """The callback by which the step sums over the ranks. C++ passes no exception on, so it is stored."""

    def __init__(self, forward: NativeForward, collective: Collective) -> None:
        self.failure: Exception | None = None
        self._forward = forward
        self._collective = collective
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
        span.state = state.memory.ctypes.data
    for span, extent, slab in zip(spans, step.extents, step.slabs, strict=True):
        span.slabs = place
        span.first = first
        span.count = extent.count
        span.offset = extent.offset
        first += extent.count
        for memory in slab.pool.memories:  # (layers, 2, slots, kv heads, capacity, head dim)
            layer, values, slot, head = (stride // 4 for stride in memory.strides[:4])
            slabs[place] = library.Slab(memory.ctypes.data + 4 * slab.slot * slot, values, layer, head)
            place += 1
    return spans, slabs
