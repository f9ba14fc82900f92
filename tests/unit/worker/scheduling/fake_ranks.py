"""Ranks without a model: they keep each sequence's fed tokens, and the next token is a pure function of those."""

from __future__ import annotations

import itertools
import zlib

from control.commands import BatchChange, Prefix
from control.messages import Sampling
from control.placement.need import PLAIN, KVCost
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import SOLE, Finisher, Flow, Sequence, SequenceState, StepPlan

VOCABULARY = 250
EOS = 7
SPOILT = 255


def next_token(context: list[int]) -> int:
    return zlib.crc32(bytes(context)) % VOCABULARY


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of a sequence when it runs alone."""
    output: list[int] = []
    while len(output) < max_tokens and EOS not in output:
        output.append(next_token(prompt + output))
    return output


class FakeRanks:
    """Executes plans as a rank reads a GenerateStep, and refuses what a rank could not do."""

    def __init__(self, kv_tokens: int, token_budget: int, cost: KVCost = PLAIN) -> None:
        self.kv: dict[int, list[int]] = {}
        self.kv_tokens, self.token_budget, self.cost = kv_tokens, token_budget, cost
        self._first: dict[int, int] = {}
        """The first position that layers with windows have of a sequence."""
        self._copied: dict[tuple[int, int], int] = {}
        """By sequence and position of a copy, the first position that it has."""
        self._broadcast: dict[int, int] = {}
        """Tokens sampled in the last step."""
        self._ever: set[int] = set()
        self.snapshots: dict[int, set[int]] = {}
        """Positions at which a sequence's state was kept."""
        self.shared = 0
        """Positions that began a sequence without being fed."""

    def _first_of(self, prefix: Prefix) -> int:
        """Of a sequence that begins with `prefix`."""
        if prefix.count in self.snapshots.get(prefix.donor, ()):
            return self._copied[prefix.donor, prefix.count]
        first = self._first.get(prefix.donor, 0)
        assert first <= max(0, prefix.count - self.cost.window), "a prefix of which windows are gone"
        return max(first, self.cost.freed(prefix.count))

    def spoil(self, sid: int) -> None:
        """The sequence's KV is not to be trusted any more: whoever begins with it goes wrong."""
        self.kv[sid] = [SPOILT] * len(self.kv[sid])

    def step(self, plan: StepPlan) -> dict[int, int]:
        change = plan.change
        explicit = {row.sid for row in change.rows}
        for prefix in change.prefixes:
            assert prefix.sid in explicit and prefix.sid not in self._ever, "a prefix for a sequence that is known"
            has = len(self.kv.get(prefix.donor, []))
            assert 0 < prefix.count <= has, "a prefix that its donor does not have"
            places = {has, *self.snapshots.get(prefix.donor, ())}
            assert not self.cost.state_tokens or prefix.count in places, "a prefix without a state"
            self._first[prefix.sid] = self._first_of(prefix)
            if prefix.snapshots:
                assert prefix.donor in change.left, "a donor that stays gave its copies away"
                copies = self.snapshots.get(prefix.donor, set())
                self.snapshots[prefix.sid] = {place for place in copies if place <= prefix.count}
                for place in self.snapshots[prefix.sid]:
                    self._copied[prefix.sid, place] = self._copied[prefix.donor, place]
        begun = {prefix.sid: self.kv[prefix.donor][: prefix.count] for prefix in change.prefixes}
        self._ever |= begun.keys()
        self.kv |= begun
        self.shared += sum(map(len, begun.values()))
        for sid in change.left:
            del self.kv[sid]
            self.snapshots.pop(sid, None)
        for sid in change.dropped_snapshots:
            self.snapshots.pop(sid, None)
        assert set(change.paused) | set(change.kept) <= self.kv.keys()
        assert not explicit & set(change.kept)
        resting = {*change.left, *change.paused, *change.kept}
        continuing = sorted(self._broadcast.keys() - explicit - resting)
        assert plan.continuing == continuing
        for sid in continuing:
            self.kv[sid].append(self._broadcast[sid])
        sampled = list(continuing)
        for row in change.rows:
            if row.sid not in self.kv:
                assert row.offset == 0 and row.sid not in self._ever, "a forgotten sid came back"
                self._ever.add(row.sid)
                self.kv[row.sid] = []
            assert row.offset == len(self.kv[row.sid]) and row.tokens
            self.kv[row.sid] += row.tokens
            assert self.cost.copy_tokens or not row.snapshot
            if row.snapshot:
                length = len(self.kv[row.sid])
                self.snapshots.setdefault(row.sid, set()).add(length)
                self._copied[row.sid, length] = max(self._first.get(row.sid, 0), self.cost.freed(length))
            sampled += [row.sid] if row.sample else []
        fed = len(continuing) + plan.prompt_tokens
        assert 0 < fed <= self.token_budget
        copies = sum(map(len, self.snapshots.values()))
        used = sum(self.cost.rounded(len(kv)) for kv in self.kv.values()) + self.cost.copy_tokens * copies
        self._first = {sid: max(self._first.get(sid, 0), self.cost.freed(len(kv))) for sid, kv in self.kv.items()}
        assert used <= self.kv_tokens, "KV memory is overrun"
        assert sampled == plan.sampled
        self._broadcast = {sid: next_token(self.kv[sid]) for sid in sampled}
        return dict(self._broadcast)


class Simulation:
    """A leader's loop over a real scheduler and fake ranks."""

    def __init__(
        self,
        *,
        kv_tokens: int,
        token_budget: int,
        max_sequences: int,
        block_tokens: int = 1,
        prefix_tokens: int | None = None,
        state_tokens: int = 0,
        window: int = 0,
    ) -> None:
        cost = KVCost(block_tokens, state_tokens, window, windowed_bytes=3, bytes=4)
        self.scheduler = Scheduler(
            kv_tokens=kv_tokens,
            token_budget=token_budget,
            max_sequences=max_sequences,
            cost=cost,
            prefix_tokens=prefix_tokens,
        )
        self.ranks = FakeRanks(kv_tokens, token_budget, cost)
        self.finisher = Finisher(lambda tokens: "".join(chr(97 + token) for token in tokens))
        self.max_sequences = max_sequences
        self.live: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.preemptions = self.steps = self.steady_steps = 0
        self.flows: set[Flow] = set()
        self._names = itertools.count()

    def add(self, prompt: list[int], max_tokens: int, output: list[int] | None = None, flow: Flow = SOLE) -> Sequence:
        sampling = Sampling(max_tokens=max_tokens, stop_ids=[EOS])
        sequence = Sequence(
            rid=str(next(self._names)), choice=0, prompt=prompt, output=list(output or []), sampling=sampling, flow=flow
        )
        self.flows.add(flow)
        self.scheduler.add(sequence)
        self.finisher.adopt(sequence)
        self.live.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.drop(sequence.sid)
        self.live.remove(sequence)

    def step(self, cancel_meanwhile: Sequence | None = None, fail: Sequence | None = None) -> None:
        """One step; `cancel_meanwhile` is dropped while it runs, `fail` gets no token if it should be sampled."""
        self.steps += 1
        before = {sequence: (sequence.sid, sequence.state) for sequence in self.live}
        oldest = self.live[0]
        steady, running = self.scheduler.steady, {sequence.sid for sequence in self.live if sequence.cached}
        plan = self.scheduler.schedule()
        if steady:
            assert set(plan.continuing) == running and plan.change == BatchChange()
            self.steady_steps += 1
        self.preemptions += sum(
            sequence.state is SequenceState.WAITING and state is not SequenceState.WAITING
            for sequence, (_, state) in before.items()
        )
        if len(self.flows) == 1:
            assert oldest.sid == before[oldest][0], "the oldest was preempted"
            assert oldest.sid in plan.fed, "the oldest made no progress"
        assert len(plan.fed) + len(plan.change.paused) <= self.max_sequences
        rows = plan.to_sample
        tokens = self.ranks.step(plan)
        if cancel_meanwhile is not None:
            self.cancel(cancel_meanwhile)
        if fail is not None and fail in self.live and fail.sid in tokens:
            del tokens[fail.sid]
            self.ranks.spoil(fail.sid)
            self.live.remove(fail)
        self.scheduler.update(plan, tokens)
        for sequence in rows:
            if sequence.state is not SequenceState.ENDED and self.finisher.decide(sequence, tokens[sequence.sid]):
                self.scheduler.drop(sequence.sid)
                self.live.remove(sequence)
                self.ended.append(sequence)
        self.scheduler.check_integrity()

    def finish(self) -> None:
        """Run until all have ended, within the steps that the oldest's progress promises. Several flows may each have
        to compute again what they had."""
        again = 2 * len(self.flows) - 1
        work = sum(len(sequence.prompt) + 2 * sequence.sampling.max_tokens for sequence in self.live)
        limit = self.steps + again * work
        while self.live:
            self.step()
            assert self.steps <= limit, "no progress"
        assert not self.scheduler.has_work
        self.scheduler.check_integrity()
