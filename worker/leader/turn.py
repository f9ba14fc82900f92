"""A command's forwards as the leader sees them: each is sampled, and booked before another one follows at once."""

from __future__ import annotations

import time

import torch

from worker.engine.ahead import Meanwhile
from worker.leader.roster import Roster
from worker.sampling.step_sampler import StepSampler
from worker.sampling.step_scorer import StepScorer
from worker.scheduling.plan import StepPlan
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Sequence

LONGEST_S = 0.02
"""Of a command's decode forwards together, so that what arrives or is cancelled meanwhile is soon heard of."""


class Turn:
    """One command. `goes_on` is called from within the step; `book` comes after all ranks have acknowledged it.

    What is booked earlier is offered to nobody before that; where the step fails, it is forgotten with the epoch.
    """

    def __init__(self, scheduler: Scheduler, roster: Roster, sampler: StepSampler, plan: StepPlan) -> None:
        self._scheduler, self._roster, self._sampler = scheduler, roster, sampler
        self._began = self._last = time.monotonic()
        self._begin(plan)

    def _begin(self, plan: StepPlan) -> None:
        self._plan, self._booked = plan, False
        self._rows: list[Sequence] = [self._scheduler.sequence(sid) for sid in plan.sampled]
        self.score = StepScorer([self._scheduler.sequence(sid) for sid in plan.sequences])

    def sample(self, logits: torch.Tensor, sids: list[int], meanwhile: Meanwhile | None = None) -> list[int]:
        """A token for each row, negative where one failed."""
        return self._sampler.sample(self._rows, logits, sids, meanwhile)

    def goes_on(self, tokens: list[int]) -> bool:
        """Whether the same sequences decode once more: none ends, fails, waits or begins, and there is time for it."""
        now = time.monotonic()
        took, self._last = now - self._last, now
        if min(tokens) < 0 or now + took - self._began > LONGEST_S:
            return False
        self.book(tokens)
        if self._roster.urgent or not self._scheduler.steady:
            return False
        self._begin(self._scheduler.plan())
        return True

    def book(self, tokens: list[int]) -> None:
        """Give the tokens of the last forward to their sequences; nothing where that has been done."""
        if self._booked:
            return
        self._booked = True
        failed = self.score.failed
        sampled = [
            (sequence, token) for sequence, token in zip(self._rows, tokens, strict=True) if sequence not in failed
        ]
        self._scheduler.applied(self._plan, {sequence.sid: token for sequence, token in sampled if token >= 0})
        for sequence, why in failed.items():
            self._roster.failed(sequence, why)
        for sequence, found in self.score.scored.items():
            self._roster.scored(sequence, found)
        for sequence, token in sampled:
            if token < 0:
                self._roster.failed(sequence, self._sampler.failures.pop(sequence.sid))
            else:
                self._roster.sampled(sequence, token, self._sampler.logprobs.get(sequence.sid))
