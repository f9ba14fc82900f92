"""Logits at every position of a prompt, against transformers' own forward, on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from control.errors import RankError
from control.messages import GenerateStep, Scored
from tests.integration.worker.engine.ranks import Outcome, RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.test_parity import engine_of, prompt, reference
from worker.models import served
from worker.repository.families import FAMILIES

Checkpoint = Callable[[str], Path]

LENGTH = 37


def jobs() -> list[Job]:
    """Scored prompts in chunks of three sizes, one of them behind a beginning that another has computed, and company
    that is not scored."""
    text = prompt(LENGTH)
    return [
        Job(1, text, 8, 3, scored=True, stays=True),
        Job(2, text, 512, 3, scored=True),
        Job(3, prompt(21), 16, 8, start=1),
        Job(4, text, 16, 3, start=9, donor=1, shared=11, scored=True),
    ]


def assert_scored(folder: Path, outcome: Outcome) -> None:
    with torch.no_grad():
        whole = reference(folder, torch.float32)(torch.tensor([prompt(LENGTH)])).logits[0]
    positions = {job.sid: range(job.shared, LENGTH - 1) for job in jobs() if job.scored}
    assert outcome.scored.keys() == {(sid, position) for sid, its in positions.items() for position in its}
    for (_, position), logits in outcome.scored.items():
        assert (logits - whole[position]).abs().max() < 1e-4


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_one_rank(family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every position is told once, few at a time, and what is sampled beside it stays what it was."""
    monkeypatch.setattr(served, "SCORED_AT_ONCE", 5)
    engine = engine_of(checkpoint(family), "float32")
    outcome = play(engine, write(jobs()))
    assert_scored(checkpoint(family), outcome)
    unscored = [Job(job.sid, job.prompt, job.chunk, job.new, job.start) for job in jobs()]
    assert outcome.tokens == play(engine_of(checkpoint(family), "float32"), write(unscored)).tokens


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_two_ranks(family: str, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """With a vocabulary in two parts the logits are the same, and both ranks run as many collectives."""
    ranks.form(2)
    ranks.ask("load", checkpoint(family), "float32")
    first, second = ranks.ask("play", write(jobs()))
    assert_scored(checkpoint(family), first)
    assert not second.scored
    assert second.checksums == first.checksums
    assert second.collectives == first.collectives > 0


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (3, 3), (-1, 2), (4, 5)])
def test_only_what_is_fed_can_be_scored(start: int, stop: int, checkpoint: Checkpoint) -> None:
    """A range outside of the sequence's row is refused before anything is computed."""
    engine = engine_of(checkpoint("llama"), "float32")
    step = GenerateStep(
        epoch=1,
        seq=1,
        model_id="tiny",
        sequences=[1],
        tokens=[[5, 6, 7]],
        offset=[0],
        sample=[False],
        scored=[Scored(1, start, stop)],
    )
    with pytest.raises(RankError, match="can't be scored"):
        engine.run(step, None)
    assert engine.store.used_tokens == 0
