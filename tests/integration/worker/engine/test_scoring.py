"""Logits at every prompt position equal transformers': on one rank and on two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from control.commands import StepRow
from control.errors import RankError
from tests.integration.worker.engine.parity import engine_of, prompt, reference
from tests.integration.worker.engine.ranks import Outcome, RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.stepping import command, run
from worker.engine.scoring import ScoreTarget
from worker.families.registry import FAMILIES
from worker.models import served

Checkpoint = Callable[[str], Path]

LENGTH = 37
VOCABULARY = 131


SAMPLE = sorted(FAMILIES.keys() - {"internlm3", "qwen3_5_moe_text", "seed_oss"})
"""All families but those whose layers are like another one's."""


def jobs(*, copies: bool = False) -> list[Job]:
    """Scored prompts in chunks of three sizes, one of them behind a beginning that another has computed, and company
    that is not scored."""
    text = prompt(LENGTH)
    return [
        Job(1, text, 8, 3, scored=True, stays=True, states=(11,) if copies else ()),
        Job(2, text, 512, 3, scored=True),
        Job(3, prompt(21), 16, 8, start=1),
        Job(4, text, 16, 3, start=9, donor=1, shared=11, scored=True),
    ]


def targets() -> dict[int, ScoreTarget]:
    """Every scored prompt, with the log probabilities of the whole vocabulary."""
    return {job.sid: ScoreTarget(job.prompt, VOCABULARY) for job in jobs() if job.scored}


def assert_scored(folder: Path, outcome: Outcome) -> None:
    with torch.no_grad():
        whole = reference(folder, torch.float32)(torch.tensor([prompt(LENGTH)])).logits[0].log_softmax(-1)
    first = {job.sid: job.shared for job in jobs() if job.scored}
    assert outcome.scored.keys() == first.keys()
    for sid, tokens in outcome.scored.items():
        assert [token.token for token in tokens] == prompt(LENGTH)[first[sid] + 1 :]
        for token, logarithms in zip(tokens, whole[first[sid] :], strict=False):
            best = dict(token.top)
            assert best[token.token] == token.logprob and token.rank == 1 + sum(
                v > token.logprob for v in best.values()
            )
            assert (torch.tensor([best[id] for id in range(VOCABULARY)]) - logarithms).abs().max() < 1e-4


@pytest.mark.parametrize("family", SAMPLE)
def test_one_rank_scores_every_position_once(
    family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every position is told once, few at a time, and what is sampled beside it stays what it was."""
    monkeypatch.setattr(served, "SCORED_AT_ONCE", 5)
    engine = engine_of(checkpoint(family), "float32")
    outcome = play(engine, write(jobs(copies=engine.store.cost.copy_tokens > 0)), targets())
    assert_scored(checkpoint(family), outcome)
    unscored = [Job(job.sid, job.prompt, job.chunk, job.new, job.start) for job in jobs()]
    engine.clear()
    assert outcome.tokens == play(engine, write(unscored)).tokens


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_two_ranks_score_alike_with_equal_collectives(family: str, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """With a vocabulary in two parts the logits are the same, and both ranks run as many collectives."""
    ranks.form(2)
    ranks.ask("load", checkpoint(family), "float32")
    first, second = ranks.ask("play", write(jobs(copies=family == "gemma2")), targets())
    assert_scored(checkpoint(family), first)
    assert not second.scored
    assert second.checksums == first.checksums
    assert second.collectives == first.collectives > 0


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (3, 3), (-1, 2), (4, 5)])
def test_only_what_is_fed_can_be_scored(start: int, stop: int, checkpoint: Checkpoint) -> None:
    """A range outside of the sequence's row is refused before anything is computed."""
    engine = engine_of(checkpoint("llama"), "float32")
    with pytest.raises(RankError, match="can't be scored"):
        run(engine, command(1, rows=[StepRow(1, [5, 6, 7], 0, False, (start, stop))]))
    assert engine.store.used_tokens == 0
