"""Admission: which waiting sequences get a slot, the order of prompts, and preemption for shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from worker.scheduling.kv_cache import KVMemory
from worker.scheduling.sequence import Flow, Sequence, SequenceState, StepPlan

# The shares of flows in slots and KV memory, and the choice of sequences to preempt for them.
#
# A flow's share is its weight's part of both resources, among the flows that hold something or wait. Its usage is the
# larger of its two fractions (dominant resource fairness). A flow alone may use everything. While another flow waits, a
# flow above its share is preempted, its youngest sequence first.


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
        kv_tokens: Mapping[int, int],
        waiting: Iterable[Flow],
        *,
        slots: int,
        tokens: int,
    ) -> None:
        """`kv_tokens` has the KV tokens by sid; `slots` and `tokens` are all that there is."""
        self._slots = slots
        self._tokens = tokens
        self._kv_tokens = kv_tokens
        self._holdings: dict[Flow, Holding] = {flow: Holding() for flow in waiting}
        self._running: dict[Flow, list[Sequence]] = {}
        for sequence in running:
            self.take(sequence, kv_tokens.get(sequence.sid, 0))
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
        holding.tokens -= self._kv_tokens.get(sequence.sid, 0)
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


GROWTH_TOKENS = 16
"""KV kept free per running sequence when one is admitted, or the newcomer would be the next to be preempted."""
PASSED_OVER = 16
"""So many admissions in a row may pass over a flow below its share that waited before them; the next one is its own."""
MOST_GUESTS = 8
"""Requests that one claim may take beyond the room, for flows that others give way to."""


class Admission:
    """The waiting lines of a scheduler. `running` is the scheduler's own, by sid; both change it."""

    def __init__(
        self,
        running: dict[int, Sequence],
        memory: KVMemory,
        slots: int,
        whole: bool = False,
        whole_images: bool = False,
    ) -> None:
        """`whole`: prompts are not cut into chunks; `whole_images`: not inside an image."""
        self._running = running
        self._memory = memory
        self._slots = slots
        self._whole = whole
        self._whole_images = whole_images
        self.waiting = WaitingLines()
        self._turns = PrefillTurns()
        self._passed: dict[Flow, int] = {}
        """Of flows that wait: how many admissions in a row passed them over."""
        self._gave_way: set[Flow] = set()
        """Flows of the sequences that were preempted in this step."""
        self._snapshot: Shares | None = None
        self._steps = 0

    # --- a step -----------------------------------------------------------------------------------------------------

    def begin(self, budget: int) -> list[Sequence]:
        """Begin a step: who is to be preempted for the flow that is admitted next, as far as it can be fed now."""
        self._steps += 1
        self._gave_way.clear()
        self._snapshot = None
        feeding = {sequence.flow for sequence in self._running.values() if sequence.state is SequenceState.PREFILL}
        head = self._next_head(feeding)
        victims: list[Sequence] = []
        tokens = 0
        for slots, sequence in enumerate(self.waiting.of(head.flow) if head else [], 1):
            tokens += self._memory.account.rounded(sequence.length)
            more = self._victims(sequence, slots, tokens, victims)
            if more is None or (slots > 1 and tokens > budget):
                break
            victims += more
        return victims

    def gave_way(self, sequence: Sequence) -> None:
        """The sequence was preempted, and waits before the others of its flow."""
        self.waiting.put_back(sequence)
        self._gave_way.add(sequence.flow)
        self._snapshot = None

    def feed(self, plan: StepPlan, budget: int) -> None:
        """Share the budget among the flows, a chunk of a running or a new prompt at a time. A flow gets no further slot
        before its prompt is through, nor in a step in which it was preempted."""
        feeding: dict[Flow, list[Sequence]] = {}
        for sequence in self._running.values():
            if sequence.state is SequenceState.PREFILL:
                feeding.setdefault(sequence.flow, []).append(sequence)
        closed = set(self._gave_way)
        while budget > 0:
            head = self._next_head(closed.union(feeding))
            flows = [*feeding, head.flow] if head else list(feeding)
            if not flows:
                return
            flow = self._turns.next(flows)
            if line := feeding.get(flow):
                sequence = line.pop(0)
                if not line:
                    del feeding[flow]
            else:
                assert head is not None
                if self._whole and plan.change.rows and head.length > budget:
                    return
                refused = self._admit(plan, head)
                if refused is not None:
                    closed |= refused
                    continue
                sequence = head
            count = sequence.length - sequence.cached
            count = count if self._whole else min(budget, count)
            if not self._whole and (due := self._memory.until_snapshot(sequence, count, spare=self._spare())):
                closed |= {flow} if due < count else set()  # the rest of the prompt comes before the flow's next one
                count = due
            count = sequence.beside_images(count) if self._whole_images else count
            plan.feed(sequence, count)
            self._turns.fed(flow, count)
            budget -= count

    def _admit(self, plan: StepPlan, sequence: Sequence) -> set[Flow] | None:
        """Give a waiting sequence its slot. The flows that get none in this step where that can't be."""
        match = self._memory.match_prefix(sequence)
        # It waits for the prefill of its own beginning, or it would only compute that once more beside it.
        if match.awaited:
            return {sequence.flow}
        if len(self._running) >= self._slots or not self._memory.admit(sequence, match, spare=self._spare()):
            return set(self.waiting.flows)  # nobody behind it goes first, or it would starve
        self._memory.begin(plan, sequence, match)
        self.waiting.remove(sequence.sid)
        shares = self.shares()
        self._passed.pop(sequence.flow, None)
        for head in self.waiting.heads:
            if head.arrival < sequence.arrival and not shares.sated(head.flow):
                self._passed[head.flow] = self._passed.get(head.flow, 0) + 1
        shares.take(sequence, self._memory.account.held(sequence.sid))
        sequence.move(SequenceState.PREFILL)
        sequence.admitted = self._steps
        self._running[sequence.sid] = sequence
        self._memory.prefixes.follow(sequence)
        return None

    # --- shares -----------------------------------------------------------------------------------------------------

    def shares(self) -> Shares:
        """The holdings of each flow; the same object until a sequence is preempted or the next step begins."""
        if self._snapshot is None:
            account = self._memory.account
            self._snapshot = Shares(
                self._running.values(),
                account.holders,
                self.waiting.flows,
                slots=self._slots,
                tokens=account.capacity,
            )
        return self._snapshot

    def guests(self, idle: int) -> tuple[int, list[Flow]]:
        self._snapshot = None
        shares = self.shares()
        if any(not shares.sated(flow) for flow in self.waiting.flows):
            return 0, []  # the slots that can be given up are theirs
        busy = {sequence.flow for sequence in self._running.values() if sequence.state is SequenceState.PREFILL}
        busy.update(self.waiting.flows)
        sated = [flow for flow in shares.flows if flow in busy or shares.sated(flow)]
        return min(MOST_GUESTS, shares.to_spare() + idle), sated

    def _next_head(self, closed: set[Flow]) -> Sequence | None:
        heads = [head for head in self.waiting.heads if head.flow not in closed]
        if len(heads) < 2:
            return heads[0] if heads else None
        shares = self.shares()
        overdue = [head for head in heads if self._passed.get(head.flow, 0) >= PASSED_OVER]
        return min(overdue or heads, key=lambda head: (shares.order(head.flow), head.arrival))

    def _victims(self, sequence: Sequence, slots: int, tokens: int, before: list[Sequence]) -> list[Sequence] | None:
        """The sequences to preempt, after those `before`, so that a flow gets `slots` and `tokens`, the last for
        `sequence`. None if that can't be reached."""
        account = self._memory.account
        victims: list[Sequence] = []
        free = account.free + sum(account.held(victim.sid) for victim in before)
        admitted = len(self._running) - len(before)
        while admitted + slots > self._slots or tokens + self._spare() > free:
            shares = self.shares()
            victim = shares.victim(sequence, slots, tokens, self._steps)
            if victim is None:
                for spared in victims:
                    shares.take(spared, account.held(spared.sid))
                return None
            shares.give_up(victim)
            victims.append(victim)
            admitted -= 1
            free += account.held(victim.sid)
        return victims

    def _spare(self) -> int:
        return GROWTH_TOKENS * len(self._running)


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
