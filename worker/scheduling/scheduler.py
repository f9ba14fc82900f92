"""Continuous batching: decode rows first, then prefill chunks, under a token budget and a KV budget.

KV of sequences that ended is kept while nobody needs the room, and a newcomer whose context begins as another's does
gets that beginning instead of computing it.

Sequences run in the order of their arrival, and all that run arrived before all that wait. Admission is optimistic: a
sequence needs room for its context, not for all that it may still produce. When KV runs out the youngest that runs is
preempted and recomputed later. The oldest never is, and whatever was accepted fits alone, so every plan makes progress.
"""

from __future__ import annotations

from collections import deque

from control.errors import RequestTooLarge
from control.messages import Prefix
from worker.scheduling.integrity import check
from worker.scheduling.kv import KVAccount
from worker.scheduling.plan import StepPlan
from worker.scheduling.prefixes import BLOCK_TOKENS, PrefixCache, Start
from worker.scheduling.sequence import Sequence, SequenceState

__all__ = ["Scheduler", "StepPlan"]

_GROWTH_TOKENS = 16
"""KV kept free per running sequence when one is admitted, or the newcomer would be the next to be preempted."""


class Scheduler:
    """One epoch's sequences. `plan`, run it, `applied`: one plan at a time; `add` and `drop` at any moment."""

    def __init__(
        self,
        *,
        kv_tokens: int,
        token_budget: int,
        max_sequences: int,
        block_tokens: int = 1,
        prefix_tokens: int | None = BLOCK_TOKENS,
    ) -> None:
        """`kv_tokens` is the tightest rank's; `token_budget` bounds the tokens of a step, decode rows included; no
        prefix shorter than `prefix_tokens` is shared, and none at all with None."""
        if token_budget < 1 or max_sequences < 1:
            raise ValueError(f"token_budget and max_sequences must be positive, got {token_budget}, {max_sequences}")
        self._account = KVAccount(kv_tokens, block_tokens)
        self.token_budget, self._max_sequences = token_budget, max_sequences
        self.beside = token_budget
        """The most prompt tokens of a step in which a sequence decodes."""
        self._running: dict[int, Sequence] = {}  # by sid, in order of arrival
        self._waiting: deque[Sequence] = deque()  # in order of arrival
        self._known: set[int] = set()
        """Sids whose KV the ranks hold."""
        self._prefixes = PrefixCache(prefix_tokens or BLOCK_TOKENS)
        self._shares = prefix_tokens is not None
        self.isolating = False
        """Whether nobody may begin with another's KV just now, and none is kept."""
        self._kept: list[int] = []
        """Sids of ended sequences whose KV the ranks shall keep, and have not been told so."""
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
        if not sequence.prompt or len(sequence.output) >= sequence.most_tokens:
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

    @property
    def _sharing(self) -> bool:
        return self._shares and not self.isolating

    def kv_tokens(self) -> tuple[int, int]:
        """KV that running sequences hold, and that ended ones hold as long as nobody needs the room."""
        return self._account.used - self._account.kept, self._account.kept

    def drop(self, sid: int, *, failed: bool = False) -> None:
        """End a sequence in any state, also while a step with it runs; an unknown or dropped sid is no error.

        Others may begin with what it leaves, unless it has `failed`: then neither with what it began with itself.
        """
        sequence = self._running.pop(sid, None)
        if sequence is None:
            sequence = next((waiting for waiting in self._waiting if waiting.sid == sid), None)
            if sequence is None:
                return
            self._waiting.remove(sequence)
        if self._sharing and not failed and self._prefixes.keep(sequence):
            self._account.keep(sid)
            self._continuing.discard(sid)
            self._kept.append(sid)
        else:
            self._forget(sid)
        sequence.move(SequenceState.ENDED)
        if failed and sequence.begun_with:
            for kept in self._prefixes.kept:
                self._forget(kept)

    @property
    def steady(self) -> bool:
        """Whether the next plan is one more token of each sequence that was just sampled, and nothing else."""
        running = self._running
        return (
            not (self._waiting or self._left or self._kept)
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
        rows = self._plan_decode(plan)
        budget = min(self.token_budget - rows, self.beside) if rows else self.token_budget
        for sequence in self._in_state(SequenceState.PREFILL):
            budget -= self._plan_chunk(plan, sequence, budget)
        if len(self._waiting) == waiting:  # where one was just preempted, another would only take its place
            self._admit(plan, budget)
        self._known.update(plan.sequences)
        plan.left, self._left = self._left, []
        plan.kept, self._kept = [sid for sid in self._kept if self._prefixes.is_kept(sid)], []
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
                self.drop(sid, failed=True)
                continue
            sequence.output.append(tokens[sid])
            sequence.last_step = self._steps
            if sequence.state is SequenceState.PREFILL:
                sequence.move(SequenceState.DECODE)
            self._continuing.add(sid)
            self._prefixes.follow(sequence)

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
            if self._reserve(sequence.sid, sequence.cached + 1):
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
            start = self._prefixes.find(sequence) if self._sharing else Start()
            # Whoever waits for the prefill of its own beginning would only have computed it once more beside it.
            if start.awaited or not self._seat(sequence, start, spare=_GROWTH_TOKENS * len(self._running)):
                return
            if start.count:
                plan.prefixes.append(Prefix(sequence.sid, start.donor, start.count))
            sequence.cached = sequence.begun_with = start.count
            self._waiting.popleft()
            sequence.move(SequenceState.PREFILL)
            self._running[sequence.sid] = sequence
            self._prefixes.follow(sequence)
            budget -= self._plan_chunk(plan, sequence, budget)

    def _seat(self, sequence: Sequence, start: Start, spare: int) -> bool:
        """Reserve KV for all of a sequence's context. A donor that is let go for it hands its own KV over."""
        if not self._account.fits(sequence.sid, sequence.length, spare=spare):
            return False
        if not self._prefixes.use(start):
            self._forget(start.donor)
        return self._reserve(sequence.sid, sequence.length, spare=spare)

    def _reserve(self, sid: int, tokens: int, *, spare: int = 0) -> bool:
        """Reserve KV, letting go of what is kept as far as that helps, the longest unused first."""
        if not self._account.fits(sid, tokens, spare=spare):
            return False
        while not self._account.reserve(sid, tokens, spare=spare):
            self._forget(self._prefixes.kept[0])
        return True

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
        self._prefixes.forget(sid)
        self._continuing.discard(sid)
        if sid in self._known:
            self._known.remove(sid)
            self._left.append(sid)

    def check_integrity(self) -> None:
        """Raise RuntimeError where the books contradict each other; cheap enough for every idle moment."""
        check(self._account, self._prefixes, self._running, list(self._waiting), self._known)
