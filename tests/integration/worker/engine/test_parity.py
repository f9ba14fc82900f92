"""Every family against transformers' own forward and generate, alone and in company, on one rank and on several."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.integration.worker.engine.ranks import Outcome, RankGroup, play
from tests.integration.worker.engine.script import Job, write
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.experts import are_in_model
from worker.models.loading import load
from worker.repository.families import FAMILIES

Checkpoint = Callable[[str], Path]

NEW = 20
LENGTHS = (5, 21, 37)
CHUNKS = (8, 16, 512)


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 128, (length,), generator=generator).tolist()


def solo(length: int, chunk: int) -> list[Job]:
    return [Job(sid=1, prompt=prompt(length), chunk=chunk, new=NEW)]


def mixed() -> list[Job]:
    """Nine sequences, every length with every chunk, that join at different steps and so leave at different ones."""
    pairs = [(length, chunk) for length in LENGTHS for chunk in CHUNKS]
    return [Job(index, prompt(length), chunk, NEW, start=2 * index) for index, (length, chunk) in enumerate(pairs)]


@functools.cache
def reference(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model; experts in a plain loop, as the grouped kernels lack float64, and its attention written out
    where the fused one drops the soft cap."""
    config = AutoConfig.from_pretrained(folder)
    options = {"experts_implementation": "eager"} if are_in_model(config) else {}
    if getattr(config, "attn_logit_softcapping", None):
        options["attn_implementation"] = "eager"
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


@functools.cache
def generated(folder: Path, length: int) -> list[int]:
    """The answer of transformers' generate, greedy and in float64, without stopping."""
    tokens = torch.tensor([prompt(length)])
    model = reference(folder, torch.float64)
    answer = model.generate(tokens, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return answer[0, length:].tolist()


def engine_of(folder: Path, dtype: str) -> Engine:
    model = load(folder, collective=Solo(), dtype=dtype)
    return Engine(model, SlabStore(model.cache_layout, 4096), Solo())


def assert_identical(folder: Path, jobs: list[Job], outcome: Outcome) -> None:
    for job in jobs:
        expected = generated(folder, len(job.prompt))
        assert outcome.tokens[job.sid] == expected, f"prompt of {len(job.prompt)} in chunks of {job.chunk}"


def assert_close(folder: Path, jobs: list[Job], outcome: Outcome) -> None:
    """The logits of every sampled position against one plain forward over the tokens that we chose ourselves."""
    for job in jobs:
        tokens = outcome.tokens[job.sid]
        with torch.no_grad():
            whole = reference(folder, torch.float32)(torch.tensor([job.prompt + tokens[:-1]])).logits[0]
        ours, theirs = torch.stack(outcome.logits[job.sid]), whole[len(job.prompt) - 1 :]
        assert (ours - theirs).abs().max() < 1e-4


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
    for jobs in [*(solo(37, chunk) for chunk in CHUNKS), mixed()]:
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
