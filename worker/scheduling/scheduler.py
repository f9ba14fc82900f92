"""Continuous batching: decode rows first, then prefill chunks, under a token budget and a KV budget.

KV of ended sequences is kept while there is room; a sequence with the same beginning copies it instead of computing it.

Sequences wait in one line per flow (a tenant's priority class). The flow that uses least of its share is admitted
first, and a flow above its share is preempted for a waiting one (admission.py). A flow is served in order of arrival.
Admission reserves KV for the context only, not for later output. When KV runs out the youngest sequence of the flow
with the most KV is preempted and recomputed later. The oldest never is, and every sequence fits alone, so each plan
makes progress.
"""

from __future__ import annotations

from collections.abc import Mapping

from control.errors import RequestTooLarge
from control.placement.need import PLAIN, KVCost
from worker.scheduling.admission import GROWTH_TOKENS, Admission
from worker.scheduling.kv_cache import BLOCK_TOKENS, KVMemory
from worker.scheduling.lookup import PromptLookup
from worker.scheduling.sequence import Flow, Sequence, SequenceState, StepPlan

__all__ = ["Scheduler", "StepPlan"]


class Scheduler:
    """One epoch's sequences: `schedule` a step, run it, `update`. There is one plan at a time; `add` and `drop` are
    possible at any moment."""

    def __init__(
        self,
        *,
        kv_tokens: int,
        token_budget: int,
        max_sequences: int,
        cost: KVCost = PLAIN,
        prefix_tokens: int | None = BLOCK_TOKENS,
        lookup: int = 0,
        whole_prompts: bool = False,
        whole_images: bool = False,
    ) -> None:
        """`kv_tokens` is the tightest rank's, of which sequences take what `cost` says. `token_budget` bounds a step's
        tokens, decode rows included. No prefix shorter than `prefix_tokens` is shared, and none at all with None.
        `lookup` guesses of a sequence are verified in one step, where the ranks can do that. With `whole_prompts` a
        prompt is one row of one step, which may be above the budget if it has no other. With `whole_images` no row ends
        inside an image; the one that begins with it may be above the budget."""
        if token_budget < 1 or max_sequences < 1:
            raise ValueError(f"token_budget and max_sequences must be positive, got {token_budget}, {max_sequences}")
        self._memory = KVMemory(kv_tokens, cost, prefix_tokens)
        self._account = self._memory.account
        self._prefixes = self._memory.prefixes
        self._max_sequences = max_sequences
        self.token_budget = token_budget
        self.mixed_budget = self.prefill_budget = token_budget
        """The most prompt tokens of a step in which a sequence decodes, and of one in which none does."""
        self._running: dict[int, Sequence] = {}  # by sid, in the order in which they got their slots
        self._admission = Admission(self._running, self._memory, max_sequences, whole_prompts, whole_images)
        self._waiting = self._admission.waiting
        self._lookup = PromptLookup(self._account, lookup)
        self._continuing: set[int] = set()
        """Sids that were sampled in the last step, and so decode by themselves."""
        self._outstanding: StepPlan | None = None
        self._last_sid = 0
        self._last_arrival = 0
        self._steps = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def isolating(self) -> bool:
        """True if no sequence may begin with another's KV just now, and none is kept."""
        return self._memory.isolating

    @isolating.setter
    def isolating(self, isolating: bool) -> None:
        self._memory.isolating = isolating

    def room(self) -> tuple[int, int]:
        """The number of sequences, and of tokens of context, that could start now."""
        waiting = sum(self._account.rounded(sequence.length) for sequence in self._waiting)
        growth = GROWTH_TOKENS * len(self._running)
        requests = self._max_sequences - len(self._running) - len(self._waiting)
        tokens = max(0, self._account.free - waiting - growth)
        if state := self._account.cost.state_tokens:  # of each sequence, however short it is
            requests = min(requests, tokens // state)
        return max(0, requests), tokens

    def guests(self, idle: int = 0) -> tuple[int, list[Flow]]:
        """The number of requests of other flows that could be admitted, by preemption or into `idle` slots; and the
        flows that could not be: those that have their share, a waiting sequence or a prefill."""
        return self._admission.guests(idle)

    @property
    def backlog(self) -> int:
        """Tokens that wait to be fed, before any of their sequences can decode."""
        prefilling = sum(sequence.length - sequence.cached for sequence in self._in_state(SequenceState.PREFILL))
        return prefilling + sum(sequence.length for sequence in self._waiting)

    def add(self, sequence: Sequence) -> int:
        """Take a new or a continued sequence and return its sid. Raises RequestTooLarge if it can never fit."""
        if self._account.rounded(sequence.longest) > self._account.capacity:
            state = self._account.cost.state_tokens
            beside = f" and {state} for the recurrent state" if state else ""
            raise RequestTooLarge(
                f"The prompt ({len(sequence.prompt)} tokens) and max_tokens ({sequence.sampling.max_tokens}) need "
                f"{sequence.longest} tokens of KV memory{beside}, but this model has {self._account.capacity}. "
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

    def kv_tokens(self) -> tuple[int, int]:
        """KV that running sequences hold, and that ended ones hold as long as nobody needs the room."""
        return self._account.used - self._account.releasable, self._account.releasable

    @property
    def kv_limit(self) -> int:
        """The most KV that all sequences may hold together."""
        return self._account.capacity

    @property
    def steps(self) -> int:
        """Steps that were scheduled."""
        return self._steps

    @property
    def ranks_know_all(self) -> bool:
        """True if no step is to tell the ranks what to keep or forget."""
        return self._memory.settled

    def lower_kv_limit(self, tokens: int) -> None:
        """Do with so many tokens of KV memory as soon as the sequences that run allow it: none ends or gives way for it
        alone, and each still fits. What is kept of ended ones goes as far as that helps. Call again until `kv_limit` is
        as low."""
        sequences = [*self._running.values(), *self._waiting]
        longest = max((self._account.rounded(sequence.longest) for sequence in sequences), default=1)
        self._memory.lower(max(tokens, longest), spare=GROWTH_TOKENS * len(self._running))

    @property
    def kv_cost(self) -> KVCost:
        """The KV memory that sequences take."""
        return self._account.cost

    @property
    def kv_usage(self) -> float:
        """The part of the KV memory that running sequences hold, 0 to 1."""
        return (self._account.used - self._account.releasable) / max(1, self._account.capacity)

    def drop(self, sid: int, *, failed: bool = False) -> None:
        """End a sequence in any state, also while a step with it runs; an unknown sid is no error. Its KV is kept as a
        prefix for others unless it has `failed`; then the prefix that it began with is dropped too."""
        sequence = self._running.pop(sid, None) or self._waiting.remove(sid)
        if sequence is None:
            return
        self._continuing.discard(sid)
        beyond = sequence.cached > sequence.length  # guesses were right beyond its end
        sequence.end_known = not beyond and (self._outstanding is None or sid not in self._outstanding.sequences)
        sequence.cached = min(sequence.cached, sequence.length)
        if failed:
            self._memory.forget(sid)
        else:
            self._memory.end(sequence)
        sequence.move(SequenceState.ENDED)
        if failed and sequence.cached_prompt_tokens:
            self._memory.forget_kept()

    @property
    def steady(self) -> bool:
        """True if the next plan is one more token of each sequence that was just sampled, and nothing else."""
        running = self._running
        return (
            self._memory.settled
            and not self._waiting
            and self._continuing == running.keys()
            and 0 < len(running) <= self.token_budget
            and self._account.can_grow({sid: sequence.cached + 1 for sid, sequence in running.items()})
            and not self._lookup.any(running.values())
        )

    # --- a step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step; it has at least one row if there is work. Raises RuntimeError before the `update` of another
        one."""
        if self._outstanding is not None:
            raise RuntimeError("a step was scheduled before `update` got the outcome of the one before it")
        plan = StepPlan()
        self._outstanding = plan
        self._steps += 1
        decodes = any(sequence.state is SequenceState.DECODE for sequence in self._running.values())
        for victim in self._admission.begin(self.mixed_budget if decodes else self.prefill_budget):
            self._preempt(victim)
        rows = self._plan_decode(plan)
        self._admission.feed(plan, min(self.token_budget - rows, self.mixed_budget if rows else self.prefill_budget))
        self._memory.add_changes(plan)
        return plan

    def update(self, plan: StepPlan, tokens: dict[int, int], accepted: Mapping[int, int] | None = None) -> None:
        """Take the outcome of `plan`: a token for each sid of `plan.sampled`, the first one where several were sampled,
        and how many of its guesses were right: the caller appends those tokens to the output. A sequence without
        a token has failed and is dropped. One that was dropped while the step ran is ignored."""
        if plan is not self._outstanding:
            raise RuntimeError("this is not the plan that is outstanding")
        self._outstanding = None
        self._continuing.clear()
        for sid, count in plan.fed.items():
            if sid in self._running:
                self._running[sid].cached += count
        for sid, guesses in plan.guesses.items():
            if sid in self._running:
                right = (accepted or {}).get(sid, 0)
                self._running[sid].cached -= len(guesses) - right
                self._lookup.verified(self._running[sid], len(guesses), right)
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
        selected = sorted(turns[: self.token_budget], key=lambda sequence: sequence.arrival)
        for sequence in selected:
            self._grow(sequence)
        rows = [sequence for sequence in selected if sequence.state is SequenceState.DECODE]  # the others gave way
        guesses = {} if self.isolating else self._lookup.guesses(rows, self.token_budget)
        for sequence in rows:
            if sequence.sid in guesses:
                plan.feed(sequence, 1, guesses[sequence.sid])
            elif sequence.sid in self._continuing:
                plan.continue_decode(sequence)
            else:
                plan.feed(sequence, 1)  # it sat out the last step, so the ranks don't have its token at hand
        plan.continuing.sort()
        planned = {sequence.sid for sequence in rows}
        plan.change.paused = [seq.sid for seq in self._in_state(SequenceState.DECODE) if seq.sid not in planned]
        return len(rows) + sum(map(len, guesses.values()))

    def _grow(self, sequence: Sequence) -> None:
        """Reserve one more position, preempting others as needed, or `sequence` itself."""
        while sequence.state is SequenceState.DECODE and not self._memory.reserve(sequence.sid, sequence.cached + 1):
            self._preempt(self._admission.shares().largest(spared=next(iter(self._running.values()))))

    # --- the books --------------------------------------------------------------------------------------------------

    def _in_state(self, state: SequenceState) -> list[Sequence]:
        return [sequence for sequence in self._running.values() if sequence.state is state]

    def _next_sid(self) -> int:
        self._last_sid += 1
        return self._last_sid

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's slot away; it waits at the front of its line, to be recomputed under a new sid."""
        del self._running[sequence.sid]
        self._continuing.discard(sequence.sid)
        self._memory.preempt(sequence)
        sequence.move(SequenceState.WAITING)
        sequence.sid = self._next_sid()
        sequence.cached = 0
        sequence.preempted = True
        self._admission.gave_way(sequence)

    def check_integrity(self) -> None:
        """Raise RuntimeError naming what contradicts itself; cheap enough for every idle moment."""
        account = self._account
        running = self._running
        cached = self._prefixes.ended
        resident = self._memory.resident
        arrivals: dict[Flow, list[int]] = {}
        for sequence in [*running.values(), *self._waiting]:
            arrivals.setdefault(sequence.flow, []).append(sequence.arrival)
        holders = account.holders
        copies = account.cost.copy_tokens * sum(account.snapshots.values())
        of_cached = sum(holders.get(sid, 0) for sid in cached) + copies
        all_known = [*running.values(), *map(self._prefixes.sequence, cached)]
        snapshots = {sequence.sid: len(sequence.snapshots) for sequence in all_known if sequence.snapshots}
        running_or_cached = running.keys() | set(cached)
        differ = holders.keys() != running_or_cached
        faults = {
            "KV is held by a sequence that neither runs nor is kept, or the reverse": differ,
            "a sequence caches more than it reserved": any(
                account.rounded(s.cached) > holders.get(s.sid, 0) for s in running.values()
            ),
            "the KV account does not add up": sum(holders.values()) + copies != account.used,
            "the account of kept KV does not add up": of_cached != account.releasable,
            "the copies of recurrent states do not add up": snapshots != account.snapshots,
            "more KV is reserved than there is": account.used > account.capacity,
            "sequences of a flow are out of their order of arrival": any(
                line != sorted(line) for line in arrivals.values()
            ),
            "a sequence is filed under another sid": any(sid != sequence.sid for sid, sequence in running.items()),
            "a waiting sequence is not in the state for it": any(
                sequence.state is not SequenceState.WAITING for sequence in self._waiting
            ),
            "the ranks hold a sequence that neither runs nor is kept": not resident <= running_or_cached,
            "the ranks don't hold what is kept": not resident >= set(cached),
        }
        present = [fault for fault, true in faults.items() if true] + self._prefixes.check_integrity(set(running))
        if present:
            raise RuntimeError(f"the scheduler lost its integrity: {'; '.join(present)}")
