"""Guesses of sequences with recurrent layers: their states advance over those that were right."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import torch

from worker.kv.states import State
from worker.models.batch import Row
from worker.models.native.plan import Plan
from worker.native import library


class Guesses:
    """Recurrent layers' inputs of a step's guesses. The step itself leaves the states as they are before them."""

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
