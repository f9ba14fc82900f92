"""Commands, and an engine that runs them as a leader does: forward, sample, agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from control.commands import BatchChange, GenerateStep, StepRow
from worker.engine.scoring import PromptScores, ScoreTarget
from worker.engine.step import REJECTED, Engine

Sample = Callable[[Tensor, list[int]], list[int]]
"""(logits (rows, vocabulary), sids of the rows) → one token per row."""


@dataclass(frozen=True)
class Ran:
    """The outcome of a command on one rank."""

    sids: list[int]
    tokens: list[int]
    checksum: int
    scores: PromptScores = field(default_factory=PromptScores)


def tensor_of(logits: Any) -> Tensor:
    """The logits of either forward: those of C++ are an array."""
    return torch.as_tensor(logits)


def greedy(logits: Tensor, sids: list[int]) -> list[int]:
    """The best token of each row."""
    return logits.argmax(-1).tolist()


def rejected(tokens: list[int], sids: list[int], change: BatchChange) -> list[int]:
    """`tokens`, of which those after a wrong guess are REJECTED."""
    for row in change.rows:
        first, guesses = sids.index(row.sid) if row.guesses else 0, row.tokens[len(row.tokens) - row.guesses :]
        for index, guess in enumerate(guesses, first):
            if tokens[index] != guess:
                tokens[index + 1] = REJECTED
    return tokens


def rows(*given: tuple[int, list[int], int], sample: bool = True) -> dict[str, Any]:
    """Fields of a change with rows (sid, tokens, offset)."""
    return {"rows": [StepRow(sid, tokens, offset, sample) for sid, tokens, offset in given]}


def command(seq: int, *, repeat: bool = False, **change: Any) -> GenerateStep:
    """A step with these fields of its change."""
    return GenerateStep(epoch=1, seq=seq, model_id="tiny", change=BatchChange(**change), repeat=repeat)


def run(
    engine: Engine,
    command: GenerateStep,
    sample: Sample | None = greedy,
    targets: dict[int, ScoreTarget] | None = None,
) -> Ran:
    """One forward of the command; only rank 0 samples and scores, and without `sample` it has no tokens."""
    with engine.step(command) as step:
        forward = step.forward(targets if step.rank == 0 else None)
        samples = sample is not None and step.rank == 0 and forward.sids
        step.agree(sample(tensor_of(forward.logits), forward.sids) if samples else [])
    return Ran(forward.sids, step.tokens, step.checksum, forward.scores)
