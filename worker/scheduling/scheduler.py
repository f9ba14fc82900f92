"""Continuous batching: decode rows first, then prefill chunks, under a token budget and a KV budget.

Sequences run in the order of their arrival, and all that run arrived before all that wait. Admission is optimistic: a
sequence needs room for its context, not for all that it may still produce. When KV runs out the youngest that runs is
preempted and recomputed later. The oldest never is, and whatever was accepted fits alone, so every plan makes progress.
"""

from __future__ import annotations

from collections import deque

from control.errors import RequestTooLarge
from worker.scheduling.kv import KVAccount
from worker.scheduling.plan import StepPlan
from worker.scheduling.sequence import Sequence, SequenceState

__all__ = ["Scheduler", "StepPlan"]

_GROWTH_TOKENS = 16
"""KV kept free per running sequence when one is admitted, or the newcomer would be the next to be preempted."""


class Scheduler:
    """One epoch's sequences. `plan`, run it, `applied`: one plan at a time; `add` and `drop` at any moment."""

    def __init__(self, *, kv_tokens: int, token_budget: int, max_sequences: int, block_tokens: int = 1) -> None:
        """`kv_tokens` is the tightest rank's; `token_budget` bounds the tokens of a step, decode rows included."""
        if token_budget < 1 or max_sequences < 1:
            raise ValueError(f"token_budget and max_sequences must be positive, got {token_budget}, {max_sequences}")
        self._account = KVAccount(kv_tokens, block_tokens)
        self.token_budget, self._max_sequences = token_budget, max_sequences
        self._running: dict[int, Sequence] = {}  # by sid, in order of arrival
        self._waiting: deque[Sequence] = deque()  # in order of arrival
        self._known: set[int] = set()
        """Sids whose KV the ranks hold."""
        self._left: list[int] = []
        """Sids that the ranks shall forget before the next step."""
        self._continuing: set[int] = set()
        """Sids that were sampled in the last step, and so decode by themselves."""
        self._outstanding: StepPlan | None = None
        self._last_sid = self._last_arrival = self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def sequence(self, sid: int) -> Sequence:
        """The sequence that has this sid now. Raises KeyError for one that was dropped."""
        if sid in self._running:
            return self._running[sid]
        return {sequence.sid: sequence for sequence in self._waiting}[sid]

    def room(self) -> tuple[int, int]:
        """How many more sequences, and how many tokens of context, could start now."""
        waiting = sum(self._account.rounded(sequence.length) for sequence in self._waiting)
        growth = _GROWTH_TOKENS * len(self._running)
        requests = self._max_sequences - len(self._running) - len(self._waiting)
        return max(0, requests), max(0, self._account.free - waiting - growth)

    @property
    def backlog(self) -> int:
        """Tokens that wait to be fed, before any of their sequences can decode."""
        prefilling = sum(one.length - one.cached for one in self._in_state(SequenceState.PREFILL))
        return prefilling + sum(sequence.length for sequence in self._waiting)

    def add(self, sequence: Sequence) -> int:
        """Take a new or a continued sequence and return its sid. Raises RequestTooLarge if it can never fit."""
        if self._account.rounded(sequence.longest) > self._account.capacity:
            raise RequestTooLarge(
                f"The prompt ({len(sequence.prompt)} tokens) and max_tokens ({sequence.sampling.max_tokens}) need "
                f"{sequence.longest} tokens of KV memory, but this model has {self._account.capacity}. "
                "Shorten the prompt or lower max_tokens.",
                param="max_tokens",
            )
        if not sequence.prompt or len(sequence.output) >= sequence.sampling.max_tokens:
            raise ValueError(
                f"request {sequence.rid} choice {sequence.choice} has nothing to generate: prompt of "
                f"{len(sequence.prompt)} tokens, {len(sequence.output)} of {sequence.sampling.max_tokens} produced"
            )
        sequence.move(SequenceState.WAITING)
        sequence.sid = self._next_sid()
        self._last_arrival += 1
        sequence.arrival = self._last_arrival
        self._waiting.append(sequence)
        return sequence.sid

    def drop(self, sid: int) -> None:
        """End a sequence in any state, also while a step with it runs; an unknown or dropped sid is no error."""
        sequence = self._running.pop(sid, None)
        if sequence is None:
            sequence = next((waiting for waiting in self._waiting if waiting.sid == sid), None)
            if sequence is None:
                return
            self._waiting.remove(sequence)
        sequence.move(SequenceState.ENDED)
        self._forget(sid)

    @property
    def steady(self) -> bool:
        """Whether the next plan is one more token of each sequence that was just sampled, and nothing else."""
        running = self._running
        return (
            not (self._waiting or self._left)
            and self._continuing == running.keys()
            and 0 < len(running) <= self.token_budget
            and self._account.can_grow({sid: sequence.cached + 1 for sid, sequence in running.items()})
        )

    # --- a step -----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """The next step; it has at least one row if there is work. Raises RuntimeError while another is not applied."""
        if self._outstanding is not None:
            raise RuntimeError("a step was planned while the one before it is not applied")
        plan = self._outstanding = StepPlan()
        self._steps += 1
        waiting = len(self._waiting)
        budget = self.token_budget - self._plan_decode(plan)
        for sequence in self._in_state(SequenceState.PREFILL):
            budget -= self._plan_chunk(plan, sequence, budget)
        if len(self._waiting) == waiting:  # where one was just preempted, another would only take its place
            self._admit(plan, budget)
        self._known.update(plan.sequences)
        plan.left, self._left = self._left, []
        return plan

    def applied(self, plan: StepPlan, tokens: dict[int, int]) -> None:
        """Take the outcome of `plan`: a token for each sid of `plan.sampled`.

        A sequence without a token has failed and is dropped. One that was dropped while the step ran is passed over.
        """
        if plan is not self._outstanding:
            raise RuntimeError("this is not the plan that is outstanding")
        self._outstanding = None
        self._continuing.clear()
        for sid, count in plan.fed.items():
            if sid in self._running:
                self._running[sid].cached += count
        for sid in plan.sampled:
            sequence = self._running.get(sid)
            if sequence is None:
                continue
            if sid not in tokens:
                self.drop(sid)
                continue
            sequence.output.append(tokens[sid])
            sequence.last_step = self._steps
            if sequence.state is SequenceState.PREFILL:
                sequence.move(SequenceState.DECODE)
            self._continuing.add(sid)

    def _plan_decode(self, plan: StepPlan) -> int:
        """Plan one token for as many decoding sequences as the budget has: the oldest always, the others by turns."""
        decoding = self._in_state(SequenceState.DECODE)
        turns = decoding[:1] + sorted(decoding[1:], key=lambda sequence: sequence.last_step)
        chosen = sorted(turns[: self.token_budget], key=lambda sequence: sequence.arrival)
        # Oldest first, victims are the youngest: a sequence is never preempted after its row was planned.
        rows = [sequence for sequence in chosen if self._grow(sequence)]
        for sequence in rows:
            if sequence.sid in self._continuing:
                plan.continuing.append(sequence.sid)
            else:
                plan.feed(sequence, 1)  # it sat out the last step, so the ranks don't have its token at hand
        plan.continuing.sort()
        planned = {sequence.sid for sequence in rows}
        plan.paused = [seq.sid for seq in self._in_state(SequenceState.DECODE) if seq.sid not in planned]
        return len(rows)

    def _grow(self, sequence: Sequence) -> bool:
        """Reserve one more position, preempting the youngest as needed; False where `sequence` itself was preempted."""
        while sequence.state is SequenceState.DECODE:
            if self._account.reserve(sequence.sid, sequence.cached + 1):
                return True
            self._preempt(next(reversed(self._running.values())))
        return False

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        """Plan as much of the sequence's context as the budget has; the tokens planned."""
        count = min(budget, sequence.length - sequence.cached)
        if count > 0:
            plan.feed(sequence, count)
        return count

    def _admit(self, plan: StepPlan, budget: int) -> None:
        """Start waiting sequences in order; the first that does not fit blocks those behind it, or it would starve."""
        while self._waiting and budget > 0 and len(self._running) < self._max_sequences:
            sequence = self._waiting[0]
            growth = _GROWTH_TOKENS * len(self._running)
            if not self._account.reserve(sequence.sid, sequence.length, spare=growth):
                return
            self._waiting.popleft()
            sequence.move(SequenceState.PREFILL)
            self._running[sequence.sid] = sequence
            budget -= self._plan_chunk(plan, sequence, budget)

    # --- the books --------------------------------------------------------------------------------------------------

    def _in_state(self, state: SequenceState) -> list[Sequence]:
        return [sequence for sequence in self._running.values() if sequence.state is state]

    def _next_sid(self) -> int:
        self._last_sid += 1
        return self._last_sid

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's KV away; it waits at the front, to be recomputed under a new sid."""
        del self._running[sequence.sid]
        self._forget(sequence.sid)
        sequence.move(SequenceState.WAITING)
        sequence.sid, sequence.cached = self._next_sid(), 0
        self._waiting.appendleft(sequence)

    def _forget(self, sid: int) -> None:
        self._account.release(sid)
        self._continuing.discard(sid)
        if sid in self._known:
            self._known.remove(sid)
            self._left.append(sid)

    def check_integrity(self) -> None:
        """Raise RuntimeError where the books contradict each other; cheap enough for every idle moment."""
        running, waiting = list(self._running.values()), list(self._waiting)
        arrivals = [sequence.arrival for sequence in running + waiting]
        holders = self._account.holders
        faults = {
            "KV is held by a sequence that does not run, or the reverse": holders.keys() != self._running.keys(),
            "a sequence caches more than it reserved": any(s.cached > holders.get(s.sid, 0) for s in running),
            "the KV account does not add up": sum(holders.values()) != self._account.used,
            "more KV is reserved than there is": self._account.used > self._account.capacity,
            "sequences are out of their order of arrival": arrivals != sorted(arrivals),
            "a sequence is filed under another sid": any(sid != s.sid for sid, s in self._running.items()),
            "a waiting sequence is not in the state for it": any(s.state is not SequenceState.WAITING for s in waiting),
            "the ranks hold a sequence that does not run": not self._known <= self._running.keys(),
        }
        found = [fault for fault, present in faults.items() if present]
        if found:
            raise RuntimeError(f"the scheduler lost its integrity: {'; '.join(found)}")
