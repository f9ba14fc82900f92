"""Shared prefixes change no token: against transformers' generate on the whole prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.integration.worker.engine.parity import NEW, engine_of, prompt, reference
from tests.integration.worker.engine.ranks import Outcome, RankGroup, play
from tests.integration.worker.engine.script import Job, write
from worker.families.registry import FAMILIES

Checkpoint = Callable[[str], Path]

CHUNKS = (8, 16, 512)
EVERY_CHUNK = ("gemma3_text", "mistral", "qwen3")
"""Families that run in chunks of every size: how a cache is cut does not depend on the rest of a layer."""


@functools.cache
def answered(folder: Path, context: tuple[int, ...]) -> list[int]:
    """The answer of transformers' generate, greedy and in float64."""
    model = reference(folder, torch.float64)
    tokens = torch.tensor([context])
    # Without a mask generate would take an ordinary 0 in the prompt for padding.
    mask = torch.ones_like(tokens)
    answer = model.generate(
        tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return answer[0, len(context) :].tolist()


SAMPLE = sorted(FAMILIES.keys() - {"internlm3", "qwen3_5_moe_text", "seed_oss"})
"""All families but those whose layers are like another one's."""


def conversation(folder: Path, chunk: int, *, copies: bool = False) -> list[Job]:
    """Sequence 1 runs; 2 copies the beginning of it meanwhile, 3 most of it once it has ended, 4 is its second turn and
    takes it over; 5 is cut out of the second turn and takes that over. Nobody else's tokens are in the memory. With
    `copies` 1 keeps some at these places, which 4 takes over too: of recurrent states, of what windows see."""
    first = prompt(37)
    second = first + answered(folder, tuple(first)) + prompt(5)
    jobs = [
        Job(1, first, chunk, NEW, stays=True, states=(20, 30, 36) if copies else ()),
        Job(2, first[:20] + prompt(21), chunk, NEW, start=8, donor=1, shared=20),
        Job(3, first[:36] + prompt(5), chunk, NEW, start=30, donor=1, shared=36),
        Job(4, second, chunk, NEW, start=31, donor=1, shared=len(first) + NEW - 1, takes_over=True, stays=True),
        Job(5, second[:30] + prompt(21), chunk, NEW, start=70, donor=4, shared=30, takes_over=True),
    ]
    apart = [
        replace(job, sid=job.sid + 10, donor=0, shared=0, takes_over=False, stays=False, states=()) for job in jobs
    ]
    return [*jobs, *apart[:2]]


def assert_identical(folder: Path, jobs: list[Job], outcome: Outcome) -> None:
    for job in jobs:
        assert outcome.tokens[job.sid] == answered(folder, tuple(job.prompt)), f"sequence {job.sid}"


@pytest.mark.parametrize("family", SAMPLE)
def test_one_rank_equals_generate(family: str, checkpoint: Checkpoint) -> None:
    """Greedy float64 tokens are those of the whole prompt computed alone: copied from a running and from an ended
    sequence, cut, extended and handed over, in chunks (of every size in some families), beside others."""
    folder = checkpoint(family)
    engine = engine_of(folder, "float64")
    for chunk in CHUNKS if family in EVERY_CHUNK else CHUNKS[:1]:
        jobs = conversation(folder, chunk, copies=engine.store.cost.copy_tokens > 0)
        outcome = play(engine, write(jobs))
        assert_identical(folder, jobs, outcome)
        assert outcome.left_over == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", EVERY_CHUNK)
def test_two_ranks_equal_generate(family: str, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Two processes give the same tokens and checksums, before and after their group was formed anew."""
    folder = checkpoint(family)
    ranks.form(2)
    ranks.ask("load", folder, "float64")
    for chunk in CHUNKS[1:]:
        jobs = conversation(folder, chunk, copies=family != "qwen3")
        first, second = ranks.ask("play", write(jobs))
        assert_identical(folder, jobs, first)
        assert second.checksums == first.checksums
        ranks.form(2)


def test_another_prefix_gives_another_answer(checkpoint: Checkpoint) -> None:
    """The control: begun with the wrong tokens the answer is wrong, so the tests above can fail."""
    folder = checkpoint("qwen3")
    first, other = prompt(37), prompt(21)
    jobs = [Job(1, first, 512, NEW), Job(2, [*other, 9], 512, NEW, start=2, donor=1, shared=len(other))]
    outcome = play(engine_of(folder, "float64"), write(jobs))
    assert outcome.tokens[2] != answered(folder, tuple(jobs[1].prompt))
