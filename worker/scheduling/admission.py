"""Admission: which waiting sequences get a slot, the order of prompts, and preemption for shares."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from worker.scheduling.kv_cache import KVMemory
from worker.scheduling.sequence import Flow, Sequence, SequenceState, StepPlan
from worker.scheduling.shares import PrefillTurns, Shares

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
        feeding = {one.flow for one in self._running.values() if one.state is SequenceState.PREFILL}
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
        busy = {one.flow for one in self._running.values() if one.state is SequenceState.PREFILL}
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
        taken = len(self._running) - len(before)
        while taken + slots > self._slots or tokens + self._spare() > free:
            shares = self.shares()
            victim = shares.victim(sequence, slots, tokens, self._steps)
            if victim is None:
                for spared in victims:
                    shares.take(spared, account.held(spared.sid))
                return None
            shares.give_up(victim)
            victims.append(victim)
            taken -= 1
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
