"""Sequences that wait for a slot, in one line for each flow."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from worker.scheduling.sequence import Flow, Sequence


class WaitingLines:
    """Each line is in order of arrival. A sequence that was preempted goes back to the front of its line."""

    def __init__(self) -> None:
        self._lines: dict[Flow, deque[Sequence]] = {}
        self._by_sid: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_sid)

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._lines.values())

    @property
    def flows(self) -> list[Flow]:
        return list(self._lines)

    @property
    def heads(self) -> list[Sequence]:
        return [line[0] for line in self._lines.values()]

    def of(self, flow: Flow) -> list[Sequence]:
        return list(self._lines.get(flow, ()))

    def append(self, sequence: Sequence) -> None:
        self._lines.setdefault(sequence.flow, deque()).append(sequence)
        self._by_sid[sequence.sid] = sequence

    def put_back(self, sequence: Sequence) -> None:
        """Let a preempted sequence wait before the others of its flow."""
        self._lines.setdefault(sequence.flow, deque()).appendleft(sequence)
        self._by_sid[sequence.sid] = sequence

    def remove(self, sid: int) -> Sequence | None:
        """Take a sequence out of its line; None for a sid that does not wait."""
        sequence = self._by_sid.pop(sid, None)
        if sequence is not None:
            line = self._lines[sequence.flow]
            if line[0] is sequence:
                line.popleft()
            else:
                line.remove(sequence)
            if not line:
                del self._lines[sequence.flow]
        return sequence
