"""The leader's part of scoring prompts: which tokens are wanted with their log probabilities, and what is told."""

from __future__ import annotations

from control.messages import PromptToken
from worker.engine.scoring import ScoreTarget
from worker.scheduling.plan import StepPlan
from worker.scheduling.sequence import Sequence


def score_targets(plan: StepPlan) -> dict[int, ScoreTarget]:
    """By sid, the prompts of the plan that have tokens to score."""
    sequences = [plan.sequences[row.sid] for row in plan.change.rows]
    return {
        sequence.sid: ScoreTarget(sequence.prompt, sequence.sampling.prompt_logprobs or 0)
        for sequence in sequences
        if sequence.unscored
    }


def prompt_entries(sequence: Sequence, scored: list[PromptToken]) -> list[PromptToken]:
    """The next tokens of a prompt's log. The first token of all comes with the second one: nothing comes before it
    that could tell of it."""
    return scored if sequence.scored else [PromptToken(sequence.prompt[0]), *scored]
