"""Comparisons of an engine with transformers' own forward and generate, and of a sequence alone with it in company."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.integration.worker.engine.ranks import Outcome, play
from tests.integration.worker.engine.script import Job, write
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.served import are_in_model

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


def assert_same_bits_in_company(folder: Path) -> None:
    """The logits of a sequence alone, token by token, are to the bit those of it in chunks beside others."""
    jobs = mixed()
    together, last = play(engine_of(folder, "auto"), write(jobs)), jobs[-1]
    alone = play(engine_of(folder, "auto"), write([Job(1, last.prompt, 1, last.new)]))
    for ours, theirs in zip(alone.logits[1], together.logits[last.sid], strict=True):
        assert torch.equal(ours, theirs)
