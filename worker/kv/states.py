"""Recurrent states by sequence: of a layer whose attention is linear only the end of a sequence is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from worker.kv.base import CacheLayout, Extent, StateLayout
from worker.native.memory import zeros


@dataclass(frozen=True, eq=False)
class State:
    """The state of one sequence in all recurrent layers, one piece of memory; overwritten by each step."""

    layout: StateLayout
    memory: NDArray[Any]

    def window(self, layer: int) -> NDArray[Any]:
        """The last inputs of the convolution of the recurrent layer `layer`: (window, channels)."""
        layout = self.layout
        start = layer * self.layout.layer_numbers
        return self.memory[start : start + layout.convolution].reshape(layout.window, layout.channels)

    def matrices(self, layer: int) -> NDArray[Any]:
        """The matrices of the recurrent layer `layer`: (heads, key dim, value dim)."""
        layout = self.layout
        stop = (layer + 1) * self.layout.layer_numbers
        matrices = self.memory[stop - layout.layer_numbers + layout.convolution : stop]
        return matrices.reshape(layout.heads, layout.key_dim, layout.value_dim)


class States:
    """The states of all sequences of a store. Their number is bounded by the store's capacity, of which each takes
    `state_tokens`. Memory of states that were dropped is used again."""

    def __init__(self, layout: CacheLayout) -> None:
        assert layout.state is not None
        self._layout = layout
        self._shape = layout.state
        self._states: dict[int, State] = {}
        self._snapshots: dict[int, dict[int, State]] = {}
        """Sequence → position → a copy of its state there."""
        self._unused: list[State] = []
        self._begun: set[int] = set()
        """Sequences of a step that is not committed: their states may have taken its tokens."""

    def begin(self, extent: Extent) -> State:
        """The state of a sequence for a step, zeros at its first position. Raises RuntimeError after a step that failed
        in the middle: a state can't be rewound."""
        sid = extent.sid
        if extent.offset == 0:
            state = self._states.get(sid) or self._take()
            state.memory[:] = 0
            self._states[sid] = state
        elif sid in self._begun:
            raise RuntimeError(f"the recurrent state of sequence {sid} was lost in a step that failed")
        self._begun.add(sid)
        return self._states[sid]

    def commit(self, sid: int) -> None:
        """The step is done."""
        self._begun.discard(sid)

    def snapshot(self, sid: int, position: int) -> None:
        """Keep a copy of a state, which holds the first `position` tokens."""
        self._snapshots.setdefault(sid, {})[position] = self._copy(self._states[sid])

    def snapshots(self, sid: int) -> int:
        """The number of copies of a sequence's state."""
        return len(self._snapshots.get(sid, ()))

    def drop_snapshots(self, sid: int) -> None:
        """Forget the copies of a sequence's state; an unknown one is no error."""
        self._unused += self._snapshots.pop(sid, {}).values()

    def at(self, sid: int, position: int, length: int) -> State | None:
        """The state behind the first `position` of a sequence's `length` tokens; None where there is none."""
        if position == length and sid not in self._begun:
            return self._states[sid]
        return self._snapshots.get(sid, {}).get(position)

    def fork(self, sid: int, donor: int, count: int, length: int, *, snapshots: bool) -> None:
        """Let the unknown sequence `sid` begin with a copy of the state behind the first `count` of the donor's
        `length` tokens. `snapshots` gives it the donor's copies up to there. Raises RuntimeError where no state was
        kept."""
        state = self.at(donor, count, length)
        if state is None:
            raise RuntimeError(f"no recurrent state of sequence {donor} was kept at {count}")
        self._states[sid] = self._copy(state)
        if snapshots:
            theirs = self._snapshots.get(donor, {})
            ours = {position: theirs.pop(position) for position in list(theirs) if position <= count}
            self._snapshots |= {sid: ours} if ours else {}

    def drop(self, sid: int) -> None:
        """Forget a state and its copies; an unknown one is no error."""
        self._begun.discard(sid)
        self.drop_snapshots(sid)
        if (state := self._states.pop(sid, None)) is not None:
            self._unused.append(state)

    def clear(self) -> None:
        """Forget every state, and give the memory back."""
        self._states.clear()
        self._snapshots.clear()
        self._unused.clear()
        self._begun.clear()

    def _copy(self, state: State) -> State:
        copy = self._take()
        copy.memory[:] = state.memory
        return copy

    def _take(self) -> State:
        if self._unused:
            return self._unused.pop()
        return State(self._shape, zeros(self._shape.numbers, self._layout.state_dtype))
