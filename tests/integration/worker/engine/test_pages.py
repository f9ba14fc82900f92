"""Paged KV equals slabs on whole models: pages are what GPUs have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from control.errors import RankError
from tests.integration.worker.engine import test_prefixes
from tests.integration.worker.engine.parity import assert_identical, mixed
from tests.integration.worker.engine.ranks import play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.stepping import command, rows, run
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.torch import plain_attention
from worker.kv.torch.pages import PagedStore
from worker.models.loading import load
from worker.native.host import SWITCH

Checkpoint = Callable[[str], Path]


def paged_engine(folder: Path, tokens: int = 4096, block_tokens: int = 16) -> Engine:
    model = load(folder, collective=Solo(), dtype="float64")
    return Engine(model, PagedStore(model.cache_layout, tokens, 512, plain_attention.attend, block_tokens), Solo())


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma2"])
def test_pages_equal_generate(family: str, checkpoint: Checkpoint) -> None:
    """A mixed batch over pages has the tokens of transformers' generate: plain, with windows, with windows and caps."""
    folder = checkpoint(family)
    engine = paged_engine(folder)
    outcome = play(engine, write(mixed()))
    assert_identical(folder, mixed(), outcome)
    assert outcome.left_over == 0


def test_shared_beginnings_over_pages(checkpoint: Checkpoint) -> None:
    """Sequences that begin with another's blocks have the tokens of the whole prompt computed alone."""
    folder = checkpoint("mistral")
    engine = paged_engine(folder)
    store = engine.store
    assert isinstance(store, PagedStore)
    for memory in store._memories:
        memory.fill_(float("nan"))
    jobs = test_prefixes.conversation(folder, 16)
    outcome = play(engine, write(jobs))
    test_prefixes.assert_identical(folder, jobs, outcome)
    engine.clear()
    assert store.free_blocks * 16 == store.capacity_tokens


def test_a_step_must_fit_in_whole_blocks(checkpoint: Checkpoint) -> None:
    """Two sequences of nine tokens fill two blocks of sixteen; a third is refused before anything is changed."""
    engine = paged_engine(checkpoint("llama"), tokens=32)
    run(engine, command(1, **rows((1, [5] * 9, 0), (2, [6] * 9, 0), sample=False)))
    with pytest.raises(RankError, match="needs 48 cached tokens, but there is room for 32"):
        run(engine, command(2, **rows((3, [7], 0), sample=False)))
    assert (engine.store.length(3), engine.store.used_tokens) == (None, 32)


def test_the_kernels_serve_a_whole_model(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the Triton kernels, float32 logits of chunks and decode rows are those of plain torch within 1e-4."""
    pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")
    from worker.kv.torch import paged_kernels as paged

    monkeypatch.setenv(SWITCH, "0")  # C++ reads no pages
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(checkpoint("gemma2"), collective=Solo(), dtype="float32", device=device)
    jobs = [Job(1, list(range(11)), 8, 2), Job(2, list(range(40, 45)), 16, 2, start=1)]
    runs = [
        play(Engine(model, PagedStore(model.cache_layout, 128, 512, attention, 16), Solo()), write(jobs))
        for attention in (plain_attention.attend, paged.attend)
    ]
    for job in jobs:
        theirs, ours = (torch.stack(run.logits[job.sid]) for run in runs)
        assert (theirs - ours).abs().max() < 1e-4
