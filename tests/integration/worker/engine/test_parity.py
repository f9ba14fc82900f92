"""Every family equals transformers' forward and generate: alone and in company, on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.worker.engine.parity import (
    CHUNKS,
    LENGTHS,
    assert_close,
    assert_identical,
    engine_of,
    generated,
    mixed,
    solo,
)
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import write
from worker.families.registry import FAMILIES

Checkpoint = Callable[[str], Path]

ALONE_TOO = ("lfm2", "llama", "qwen3_moe", "qwen3_next")
"""Families whose two ranks run a sequence alone too. That company changes nothing is shown for each on one rank."""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_one_rank_equals_generate(family: str, checkpoint: Checkpoint) -> None:
    """Greedy float64 tokens equal those of generate for every chunk size, alone and among nine of every length."""
    folder = checkpoint(family)
    engine = engine_of(folder, "float64")
    for jobs in [*(solo(37, chunk) for chunk in CHUNKS), mixed()]:
        outcome = play(engine, write(jobs))
        assert_identical(folder, jobs, outcome)
        assert outcome.left_over == 0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_answers_depend_on_the_prompt(family: str, checkpoint: Checkpoint) -> None:
    """The tiny models are no constant functions: answers differ between prompts and hold several tokens."""
    answers = [tuple(generated(checkpoint(family), length)) for length in LENGTHS]
    assert len(set(answers)) == len(LENGTHS)
    assert all(len(set(answer)) > 4 for answer in answers)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_one_rank_logits(family: str, checkpoint: Checkpoint) -> None:
    """Float32 logits of a mixed batch are within 1e-4 of transformers' forward."""
    folder, jobs = checkpoint(family), mixed()
    assert_close(folder, jobs, play(engine_of(folder, "auto"), write(jobs)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_two_ranks_equal_generate(family: str, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Two processes give generate's tokens in every run, agree on each step, and call as many collectives."""
    folder = checkpoint(family)
    ranks.form(2)
    ranks.ask("load", folder, "float64")
    for jobs in [*(solo(37, chunk) for chunk in CHUNKS if family in ALONE_TOO), mixed()]:
        first, second = ranks.ask("play", write(jobs))
        assert_identical(folder, jobs, first)
        assert second.tokens == first.tokens
        assert second.checksums == first.checksums
        assert second.collectives == first.collectives > 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_two_ranks_logits(family: str, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Float32 logits of two ranks are within 1e-4 of transformers' forward."""
    folder, jobs = checkpoint(family), mixed()
    ranks.form(2)
    ranks.ask("load", folder, "float32")
    assert_close(folder, jobs, ranks.ask("play", write(jobs))[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_four_ranks_share_two_key_value_heads(family: str, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """With more ranks than key-value heads, pairs of ranks repeat one head and the tokens stay the same."""
    folder, jobs = checkpoint(family), mixed()
    ranks.form(4)
    ranks.ask("load", folder, "float64")
    outcomes = ranks.ask("play", write(jobs))
    assert_identical(folder, jobs, outcomes[0])
    assert len({tuple(outcome.checksums) for outcome in outcomes}) == 1
    assert len({outcome.collectives for outcome in outcomes}) == 1
