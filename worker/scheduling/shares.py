"""The shares of flows in slots and KV memory, and the choice of sequences to preempt for them.

A flow's share is its weight's part of both resources, among the flows that hold something or wait. Its usage is the
larger of its two fractions (dominant resource fairness). A flow alone may use everything. While another flow waits, a
flow above its share is preempted, its youngest sequence first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from worker.scheduling.sequence import Flow, Sequence

WEIGHTS = {"high": 16, "normal": 4, "low": 1}
"""Weights of the priority classes; each is four times the next one."""
LAST_STAYS_STEPS = 64
LAST_STAYS_PART = 16
"""The only sequence of a flow runs for LAST_STAYS_STEPS steps and one more for each LAST_STAYS_PART tokens of its
context before it is preempted for a share. So what is recomputed stays in proportion to what was produced."""


@dataclass(slots=True)
class Holding:
    slots: int = 0
    tokens: int = 0


class Shares:
    """A snapshot of what the running sequences hold. `take` and `give_up` keep it true while a step is planned."""

    def __init__(
        self,
        running: Iterable[Sequence],
        held: Mapping[int, int],
        waiting: Iterable[Flow],
        *,
        slots: int,
        tokens: int,
    ) -> None:
        """`held` has the KV tokens by sid; `slots` and `tokens` are all that there is."""
        self._slots = slots
        self._tokens = tokens
        self._held = held
        self._holdings: dict[Flow, Holding] = {flow: Holding() for flow in waiting}
        self._running: dict[Flow, list[Sequence]] = {}
        for sequence in running:
            self.take(sequence, held.get(sequence.sid, 0))
        self._weight = sum(weight(flow) for flow in self._holdings)

    @property
    def flows(self) -> list[Flow]:
        return list(self._holdings)

    def take(self, sequence: Sequence, tokens: int) -> None:
        """The sequence got a slot and KV memory."""
        holding = self._holdings.setdefault(sequence.flow, Holding())
        holding.slots += 1
        holding.tokens += tokens
        self._running.setdefault(sequence.flow, []).append(sequence)

    def give_up(self, sequence: Sequence) -> None:
        """The sequence was preempted."""
        holding = self._holdings[sequence.flow]
        holding.slots -= 1
        holding.tokens -= self._held.get(sequence.sid, 0)
        self._running[sequence.flow].remove(sequence)

    def usage(self, flow: Flow, slots: int = 0, tokens: int = 0) -> float:
        """The larger fraction of what there is that the flow holds, or would hold with so much more."""
        holding = self._holdings.get(flow, Holding())
        return max((holding.slots + slots) / self._slots, (holding.tokens + tokens) / self._tokens)

    def fair(self, flow: Flow, *, newcomer: int = 0) -> float:
        """The flow's share of each resource, as a fraction; `newcomer` is the weight of a flow that is not here yet."""
        return weight(flow) / (self._weight + newcomer)

    def order(self, flow: Flow) -> float:
        """The sort key of admission: the flow with the least is admitted first."""
        return self.usage(flow, slots=1) / weight(flow)

    def victim(self, sequence: Sequence, slots: int, tokens: int, step: int) -> Sequence | None:
        """The sequence to preempt so that a flow gets `slots` and `tokens` more, the last for the waiting `sequence`;
        None if there is none.

        A flow without a slot gets its first one at the cost of any flow above its share. Other flows get more only up
        to their share, and a sequence that was preempted itself waits for free room.
        """
        flow = sequence.flow
        first = self._holdings[flow].slots == 0 and slots == 1
        if not first and (sequence.preempted or self.usage(flow, slots, tokens) > self.fair(flow)):
            return None
        above = [other for other in self._running if other != flow and self.usage(other) > self.fair(other)]
        for other in sorted(above, key=lambda flow: self.usage(flow) / weight(flow), reverse=True):
            members = self._running[other]
            youngest = max(members, key=lambda member: member.arrival)
            if len(members) > 1 or (first and _has_had_its_time(youngest, step)):
                return youngest
        return None

    def largest(self, spared: Sequence) -> Sequence:
        """The sequence that gives way where memory has run out: the youngest of the flow that has most of it, but never
        `spared` unless it is alone."""
        flows = sorted(self._running, key=lambda flow: self._holdings[flow].tokens / weight(flow), reverse=True)
        for flow in flows:
            members = [member for member in self._running[flow] if member is not spared]
            if members:
                return max(members, key=lambda member: member.arrival)
        return spared

    def to_spare(self) -> int:
        """The number of slots that flows above their share would give up for a normal flow that is not here yet."""
        spare = 0
        for flow, members in self._running.items():
            fair = self.fair(flow, newcomer=WEIGHTS["normal"])
            if self.usage(flow) > fair and len(members) > 1:
                holding = self._holdings[flow]
                excess = max(holding.slots / self._slots - fair, holding.tokens / self._tokens - fair)
                part = excess / self.usage(flow)
                spare += min(len(members) - 1, max(1, int(part * len(members))))
        return spare

    def sated(self, flow: Flow) -> bool:
        """True if the flow would have its share if one more normal flow came."""
        return self.usage(flow, slots=1) > self.fair(flow, newcomer=WEIGHTS["normal"])


def weight(flow: Flow) -> int:
    return WEIGHTS[flow.priority]


def _has_had_its_time(sequence: Sequence, step: int) -> bool:
    return step - sequence.admitted >= LAST_STAYS_STEPS + sequence.length // LAST_STAYS_PART


class PrefillTurns:
    """The order in which flows' prompts are computed: the flow whose turn began first is next (start-time fair
    queueing)."""

    def __init__(self) -> None:
        self._now = 0.0
        """The start of the turn that was served last."""
        self._ends: dict[Flow, float] = {}
        """The virtual time at which the last turn of each flow ends; flows that ended before now are not kept."""

    def next(self, flows: Iterable[Flow]) -> Flow:
        return min(flows, key=self._start)

    def fed(self, flow: Flow, tokens: int) -> None:
        self._now = max(self._now, start := self._start(flow))
        self._ends[flow] = start + tokens / weight(flow)
        if len(self._ends) > 1024:
            self._ends = {flow: end for flow, end in self._ends.items() if end > self._now}

    def _start(self, flow: Flow) -> float:
        return max(self._now, self._ends.get(flow, 0.0))
