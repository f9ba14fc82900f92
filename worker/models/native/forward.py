"""A model whose forward is one call: embeddings and the exchange of logits are Python's, all between is C++."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
from numpy.typing import NDArray

from worker.collective import Collective
from worker.collective.base import Link
from worker.kv.base import CacheLayout
from worker.kv.slabs import SlabStep
from worker.kv.states import State
from worker.models.native.module import NotNative, address_of
from worker.models.native.modules import LAYERS_TABLE, CausalModel
from worker.models.native.plan import Plan
from worker.models.served import Batch, Hear, Row, ServedModel, tell
from worker.native import library
from worker.native.memory import Spare, empty

if TYPE_CHECKING:  # they import torch
    from worker.models.torch.pooled import Pooler
    from worker.models.torch.vision import VisionTower

log = structlog.get_logger()

Array = NDArray[Any]

REDUCE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)


class NativeModel(ServedModel):
    """A model whose forward is C++, over slabs. One step at a time: its memory is kept for the next."""

    def __init__(
        self,
        model: CausalModel,
        plan: Plan,
        link: Link,
        cache_layout: CacheLayout,
        pooler: Pooler | None = None,
        tower: VisionTower | None = None,
    ) -> None:
        """`model` with the head of a `pooler`, if there is one, gives the hidden states after the last norm."""
        super().__init__(model.config, link, cache_layout, model.config.vocab_size, pooler, tower)
        self.module = model
        # A tied head and embedding are one table and counted once.
        self.weight_bytes = model.bytes + (0 if tower is None else tower.bytes)
        self._outputs = model.config.vocab_size if pooler is None else model.config.hidden_size
        self._axis_of = None if tower is None or tower.axes is None else np.asarray(tower.axes)
        """(head dim / 2,) int32: the axis by which each frequency turns in a batch with axes."""
        body: Any = model.model
        self._embed: Callable[[Array], Array] = body.embed_tokens
        self._embed_layers: Callable[[Array], Array] | None = getattr(body, LAYERS_TABLE, None)
        """Ids (T,) → what they give of the layers' own inputs (T, layers · width); None for a model without."""
        self._layer_ids: int = model.config.vocab_size_per_layer_input or 0
        self._plan = plan
        self._room = empty(0, np.uint8)
        self._logits = Spare()
        self._hidden = empty(0, np.float32)
        self._guesses = Guesses(plan)
        self._head_alone = library.Model.from_buffer_copy(plan.model)
        self._head_alone.depth = 0

    @property
    def is_native(self) -> bool:
        return True

    @property
    def kernels(self) -> str | None:
        return self._plan.threads.kernels

    @property
    def threads(self) -> library.Threads | None:
        return self._plan.threads

    @property
    def no_logits(self) -> Array:
        return np.empty((0, self.vocab_size), np.float32)

    def parts(self) -> Iterator[Any]:
        return (part for _, part in self.module.modules())

    @property
    def progress(self) -> int:
        return super().progress + self._plan.threads.progress

    def accept(self, accepted: Mapping[int, int]) -> None:
        self._guesses.accept(accepted)

    def _forward(self, batch: Batch, hear: Hear | None = None) -> Array:
        logits = self._step(batch)
        tell(hear, batch.scored, self._logits_at)
        return logits

    def _step(self, batch: Batch) -> Array:
        """Logits (sampled, outputs). Stores keys and values; raises what an exchange between ranks raised."""
        assert isinstance(batch.cache, SlabStep)
        images = batch.images
        self._hidden = self._embed(batch.tokens)
        if images is not None:
            self._hidden[images.places] = images.rows
        inputs = None
        if self._embed_layers is not None:
            # Ids beyond the layers' table have the inputs of the first one.
            inputs = self._embed_layers(np.where(batch.tokens < self._layer_ids, batch.tokens, 0))
        spans, slabs = places_of(batch.cache)
        reduction = _Reduction(self, self._link.collective)
        struct = library.Batch(
            spans=ctypes.addressof(spans),
            span_count=len(spans),
            slabs=ctypes.addressof(slabs),
            slab_count=len(slabs),
            positions=batch.positions.ctypes.data,
            tokens=batch.tokens.size,
            layer_inputs=address_of(inputs),
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

    def _logits_at(self, places: Array) -> Array:
        """Logits (places, outputs) of more of the tokens that were stepped through last."""
        return self._whole(self._run(self._head_alone, library.Batch(), places))

    def _run(self, model: library.Model, batch: library.Batch, places: Array) -> Array:
        """Run `batch`; the logits that this rank has of the tokens `places`."""
        logits = self._logits.empty((places.size, self._plan.head.outputs), np.float32)
        batch.hidden = self._hidden.ctypes.data
        batch.logits = logits.ctypes.data
        batch.sampled = places.ctypes.data
        batch.sampled_count = places.size
        pool = self._plan.threads.address
        compiled = self._plan.threads.library
        addresses = ctypes.addressof(model), ctypes.addressof(batch)
        needed = compiled.furrow_step_room(pool, *addresses)
        if needed > self._room.size:
            self._room = empty(needed, np.uint8)
        compiled.furrow_step(pool, *addresses, self._room.ctypes.data)
        return logits

    def _whole(self, logits: Array) -> Array:
        collective = self._link.collective
        if collective.world_size > 1 and logits.size:
            logits = collective.all_gather(logits)
        return logits[:, : self._outputs]

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
        addresses = ctypes.addressof(self._plan.model), ctypes.addressof(batch)
        needed = compiled.furrow_replay_room(pool, *addresses)
        if needed > self._room.size:
            self._room = empty(needed, np.uint8)
        compiled.furrow_replay(pool, *addresses, self._room.ctypes.data)


def plan_of(model: CausalModel, layout: CacheLayout) -> Plan | None:
    """The plan of the forward in C++, or None where torch runs it; the log says which, and why."""
    try:
        plan = Plan(model, layout)
    except NotNative as reason:
        log.info("torch runs the forward", reason=str(reason), action="choose_forward")
        return None
    log.info("the forward runs in C++", threads=plan.threads.count, action="choose_forward")
    return plan


class _Reduction:
    """The callback by which the step sums over the ranks. C++ passes no exception on, so it is stored."""

    def __init__(self, model: NativeModel, collective: Collective) -> None:
        self.failure: Exception | None = None
        self._model = model
        self._collective = collective
        self.function = REDUCE(self._reduce)

    def _reduce(self, group: Any, address: int, count: int) -> int:
        try:
            self._collective.all_reduce(self._model.floats(address, count))
        except Exception as error:
            self.failure = error
        return int(self.failure is not None)


def places_of(step: SlabStep) -> tuple[ctypes.Array[library.Span], ctypes.Array[library.Slab]]:
    """The places of each sequence's tokens in the batch, and of its keys and values in memory: by sequence a slab for
    each of the layout's groups."""
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
        for memory in slab.pool.memories:  # (layers, parts, slots, kv heads, capacity, row)
            layer, part, slot, head = memory.strides[:4]
            values = part * (memory.shape[1] - 1)
            slabs[place] = library.Slab(memory.ctypes.data + slab.slot * slot, values, layer, head)
            place += 1
    return spans, slabs
