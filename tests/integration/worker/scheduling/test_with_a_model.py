"""Scheduling changes no token of a model: scheduler, engine and sampler together; company, preemption and adoption."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from control.messages import Sampling
from tests import models
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.base import CacheLayout
from worker.kv.slabs import SlabStore
from worker.leader.group import generate_step
from worker.models.loading import load
from worker.models.served import ServedModel
from worker.native.library import load_library
from worker.sampling.sampler import SamplingRow
from worker.sampling.torch.sampler import TensorSampler
from worker.scheduling.scheduler import Scheduler
from worker.scheduling.sequence import Sequence

MAX_TOKENS = 40
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.1},
    {"temperature": 0.9, "top_p": 0.7, "presence_penalty": 0.5, "typical_p": 0.9},
]


@pytest.fixture(scope="module", params=["llama", "gemma3_text", "qwen3_5_text", "lfm2", "granitemoehybrid"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A model of attention, one with windows, and some with recurrent layers; those in C++ where this is possible."""
    torch.set_num_threads(1)
    dtype = "float64" if request.param == "llama" or load_library() is None else "float32"
    return load(models.make(request.param, tmp_path_factory.mktemp("model")), collective=Solo(), dtype=dtype)


def requests() -> list[Sequence]:
    return [
        Sequence(
            rid=str(index),
            choice=index % 2,
            prompt=[(7 * index + position) % 128 for position in range(5 + 4 * index)],
            sampling=Sampling(max_tokens=MAX_TOKENS, seed=str(index + 1), **sampling),
        )
        for index, sampling in enumerate(SAMPLINGS)
    ]


def row(sequence: Sequence) -> SamplingRow:
    return SamplingRow(
        sampling=sequence.sampling,
        seed=int(sequence.sampling.seed),
        choice=sequence.choice,
        position=len(sequence.output),
        prompt=sequence.prompt,
        output=sequence.output,
    )


def generate(
    model: ServedModel,
    sequences: list[Sequence],
    *,
    kv_tokens: int,
    token_budget: int,
    steps: int = 10_000,
    prefix_tokens: int | None = None,
    every: int = 0,
    pixels: dict[str, bytes] | None = None,
) -> int:
    """Run the sequences to their ends, or for so many steps; returns the number of preemptions.

    They arrive together, or one after so many steps. `pixels` of images are by digest.
    """
    engine = Engine(model, SlabStore(model.cache_layout, kv_tokens), Solo())
    if engine.images is not None:
        engine.images.pixels = dict(pixels or {})
    scheduler = Scheduler(
        kv_tokens=kv_tokens,
        token_budget=token_budget,
        max_sequences=8,
        prefix_tokens=prefix_tokens,
        cost=engine.store.cost,
        whole_images=engine.images is not None and engine.images.whole,
    )
    coming = list(sequences)
    sampler, seq = TensorSampler(), 0
    while (scheduler.has_work or coming) and seq < steps:
        while coming and seq >= every * (len(sequences) - len(coming)):
            scheduler.add(coming.pop(0))
        seq += 1
        if not scheduler.has_work:
            continue
        plan = scheduler.schedule()
        planned = plan.to_sample
        command = generate_step({"epoch": 1, "seq": seq}, "tiny", plan.change, images=plan.images)
        with engine.step(command) as step:
            forward = step.forward()
            assert forward.sids == plan.sampled
            logits = torch.as_tensor(np.asarray(forward.logits))
            tokens = [one.token for one in sampler.sample(logits, [row(sequence) for sequence in planned])]
            step.agree(tokens)
        scheduler.update(plan, dict(zip(plan.sampled, tokens, strict=True)))
        for sequence in planned:
            if len(sequence.output) == MAX_TOKENS:
                scheduler.drop(sequence.sid)
        scheduler.check_integrity()
    return sum(sequence.sid > len(sequences) for sequence in sequences)


@pytest.fixture(scope="module")
def alone(model: ServedModel) -> list[list[int]]:
    """The tokens of each request when it runs alone."""
    sequences = requests()
    for sequence in sequences:
        generate(model, [sequence], kv_tokens=200, token_budget=200)
    return [sequence.output for sequence in sequences]


@pytest.mark.parametrize("token_budget", [3, 8, 64])
def test_company_changes_nothing(model: ServedModel, alone: list[list[int]], token_budget: int) -> None:
    """In one batch with others, in chunks of any size, each request gets the tokens it gets alone."""
    sequences = requests()
    assert generate(model, sequences, kv_tokens=1_000, token_budget=token_budget) == 0
    assert [sequence.output for sequence in sequences] == alone


def test_preemption_changes_nothing(model: ServedModel, alone: list[list[int]]) -> None:
    """Requests that together outgrow the KV memory are recomputed, and get the tokens they get alone."""
    sequences = requests()
    assert generate(model, sequences, kv_tokens=130, token_budget=16) > 0
    assert [sequence.output for sequence in sequences] == alone


def test_adoption_changes_nothing(model: ServedModel, alone: list[list[int]]) -> None:
    """A new engine that is given prompts and tokens so far goes on with the tokens each request gets alone."""
    first = requests()
    generate(model, first, kv_tokens=1_000, token_budget=32, steps=20)
    second = requests()
    for interrupted, adopted in zip(first, second, strict=True):
        adopted.output = list(interrupted.output)
    assert any(sequence.output for sequence in second)
    generate(model, second, kv_tokens=1_000, token_budget=32)
    assert [sequence.output for sequence in second] == alone


def turns() -> list[Sequence]:
    """The requests, and each of them once more with its end changed; none begins with another one's tokens."""
    again = requests()
    for index, sequence in enumerate(again):
        sequence.rid = f"again {index}"
        sequence.prompt = [*sequence.prompt[:-1], 127, 3]
    return [sequence for pair in zip(requests(), again, strict=True) for sequence in pair]


@pytest.mark.parametrize(("kv_tokens", "every"), [(1_000, 0), (1_000, 60), (130, 12)])
def test_shared_prefixes_change_nothing(model: ServedModel, kv_tokens: int, every: int) -> None:
    """Requests that begin alike, at once, while the other runs, after its end or amid preemptions, get the tokens that
    they get without sharing."""
    apart, together = turns(), turns()
    for sequence in apart:
        generate(model, [sequence], kv_tokens=200, token_budget=200)
    room = kv_tokens + 3 * model.cache_layout.cost.copy_tokens  # for copies of states
    generate(model, together, kv_tokens=room, token_budget=16, prefix_tokens=4, every=every)
    assert [sequence.output for sequence in together] == [sequence.output for sequence in apart]
    assert sum(sequence.cached_prompt_tokens for sequence in together) > 0


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_a_sequence_with_more_positions_than_the_memory_has_tokens(
    kv_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers with windows keep the last positions only; it gets the tokens that it gets with room for all."""
    monkeypatch.setattr("control.placement.need.CHUNK_TOKENS", 16)
    dtype = "float64" if load_library() is None else "float32"
    stored = None if dtype == "float64" else kv_type
    tiny = load(models.make("gemma3_text", tmp_path), collective=Solo(), dtype=dtype, kv_type=stored)
    assert isinstance(tiny.cache_layout, CacheLayout)
    long = Sequence(
        rid="long", choice=0, prompt=[(7 * at) % 128 for at in range(300)], sampling=Sampling(max_tokens=40, seed="1")
    )
    needed = tiny.cache_layout.cost.rounded(long.longest)
    assert needed < 300
    generate(tiny, [long], kv_tokens=needed, token_budget=16)
    roomy = Sequence(rid="long", choice=0, prompt=list(long.prompt), sampling=long.sampling)
    generate(tiny, [roomy], kv_tokens=400, token_budget=16)
    assert len(long.output) == MAX_TOKENS and long.output == roomy.output
