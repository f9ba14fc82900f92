"""The engine on a GPU equals plain torch: kernels, graphs, running ahead and sampling together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton

from control.errors import SettingsError
from control.messages import Sampling
from tests.gpu.conftest import DEVICE
from tests.integration.worker.engine.ranks import play
from tests.integration.worker.engine.script import Job, write
from worker.collective import Solo
from worker.engine.step import Engine
from worker.families.registry import FAMILIES
from worker.kv.stores import store_for
from worker.models.loading import load
from worker.models.served import Row
from worker.sampling.sampler import SamplingRow, StepSampler
from worker.sampling.torch.sampler import TensorSampler
from worker.scheduling.sequence import Sequence

Checkpoint = Callable[[str], Path]

CPU_ONLY = [name for name, family in FAMILIES.items() if family.recurrent or "attention_chunk_size" in family.fields]
"""Types with recurrent layers or attention within chunks."""

JOBS = [Job(sid, [(7 * sid + i) % 128 for i in range(5 + 9 * sid)], 16, 12, start=2 * sid) for sid in range(5)]


def engine_of(folder: Path, device: str, dtype: str = "float32") -> Engine:
    model = load(folder, collective=Solo(), dtype=dtype, device=device)
    engine = Engine(model, store_for(model.cache_layout, 2048, 512, 1), Solo())
    engine.prepare()
    return engine


def greedy(engine: Engine) -> dict[int, list[int]]:
    """The tokens of all jobs, sampled as the leader does it."""
    sampling = Sampling(max_tokens=64, temperature=0.0, seed="0")
    rows = {job.sid: Sequence(rid="", choice=0, prompt=job.prompt, sampling=sampling, sid=job.sid) for job in JOBS}
    sampler = StepSampler()
    for command in write(JOBS):
        with engine.step(command) as step:
            forward = step.forward()
            pending = sampler.begin([rows[sid] for sid in forward.sids], forward)
            step.run_ahead(pending.on_device)
            tokens = pending.wait().ids
            step.agree(tokens)
        for sid, token in zip(forward.sids, tokens, strict=True):
            rows[sid].output.append(token)
    return {sid: row.output for sid, row in rows.items()}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - set(CPU_ONLY)))
def test_the_tokens_are_the_cpus(family: str, checkpoint: Checkpoint) -> None:
    """Sequences that join, decode and leave: float32 tokens of the tiny model, whose logits lie far apart."""
    folder = checkpoint(family)
    assert greedy(engine_of(folder, DEVICE)) == greedy(engine_of(folder, "cpu"))


@pytest.mark.parametrize("family", sorted(CPU_ONLY))
def test_types_for_cpus_only_are_refused(family: str, checkpoint: Checkpoint) -> None:
    """Recurrent layers and attention within chunks have no kernels for GPUs."""
    with pytest.raises(SettingsError, match="served on CPUs only"):
        engine_of(checkpoint(family), DEVICE)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3_text"])
def test_no_kernel_is_compiled_after_the_start(
    family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks and decode steps of any number of sequences, beside each other and alone: a compilation takes longer than
    hundreds of steps."""
    engine = engine_of(checkpoint(family), DEVICE)
    compiled: list[str] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about["repr"]))
    greedy(engine)
    for count in (1, 3, 9, 40):
        engine.clear()
        rows = [Row(sid, [sid], 0, True) for sid in range(count)]
        engine.forward([*rows, Row(count, [0] * 37, 0, True), Row(count + 1, [0] * 5, 0, True)], {})
    assert compiled == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_logits_are_near(dtype: str, checkpoint: Checkpoint) -> None:
    """The cosine to float32 logits of a first token is at least 0.999."""
    folder = checkpoint("qwen3")
    job = [Job(1, list(range(40)), 16, 1)]
    ours = play_plain(engine_of(folder, DEVICE, dtype), job)
    theirs = play_plain(engine_of(folder, "cpu"), job)
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.999


def play_plain(engine: Engine, jobs: list[Job]) -> torch.Tensor:
    """The logits of the first sampled token, without running ahead."""
    engine.ahead = None
    return play(engine, write(jobs)).logits[jobs[0].sid][0].float().cpu()


def test_a_captured_step_is_the_step(checkpoint: Checkpoint) -> None:
    """Graphs were captured, and a replay in a bucket with room to spare has the logits of the same step by hand."""
    engine = engine_of(checkpoint("llama"), DEVICE)
    engine.ahead = None
    rows = [Row(sid, [sid], 0, True) for sid in range(5)]
    assert engine.graphs is not None and engine.graphs.takes(rows)
    captured = engine.forward(rows, {})[0].clone()
    engine.clear()
    engine.graphs.release()
    assert not engine.graphs.takes(rows)
    torch.testing.assert_close(engine.forward(rows, {})[0], captured, rtol=1e-5, atol=1e-5)


def test_a_second_capture_works(checkpoint: Checkpoint) -> None:
    """A new epoch's graphs give the tokens of the first one's."""
    engine = engine_of(checkpoint("gemma2"), DEVICE)
    first = greedy(engine)
    engine.leave()
    engine.join(Solo())
    engine.prepare()
    assert greedy(engine) == first


def test_drawn_tokens_are_the_cpus() -> None:
    """The noise is a hash, so a GPU draws what a CPU draws."""
    torch.manual_seed(0)
    logits = torch.randn(64, 5000) * 2
    rows = [
        SamplingRow(
            sampling=Sampling(max_tokens=9, temperature=0.7), seed=seed, choice=0, position=3, prompt=[1], output=[]
        )
        for seed in range(64)
    ]
    launched = TensorSampler().launch(logits.to(DEVICE), rows)
    assert launched is not None
    assert launched.tolist() == [sampled.token for sampled in TensorSampler().sample(logits, rows)]
