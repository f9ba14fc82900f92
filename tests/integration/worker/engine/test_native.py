"""The forward in C++ is near torch's: the same to the last bit in any company, and out of the way where it can't be."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from tests import models
from tests.exact_int8 import ExactInt8Linear
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.stepping import tensor_of
from worker.collective import Solo
from worker.engine.step import Engine
from worker.families.registry import FAMILIES
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.served import Row, ServedModel, flatten
from worker.models.torch import layers
from worker.models.torch import loading as torch_loading
from worker.models.torch.layers import DenseLinear
from worker.native.host import SWITCH
from worker.native.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")

Checkpoint = Callable[[str], Path]

PROMPT = torch.randint(0, 128, (60,), generator=torch.Generator().manual_seed(1)).tolist()
NEAR = {None: 1e-4, "f16": 1e-3, "int8": 0.6}
"""By packing, the largest difference of two logits; with 8 bits a value that is rounded the other way moves some."""


class Running:
    """A model and its slabs: what a step gives, without an engine around it."""

    def __init__(self, model: ServedModel) -> None:
        self.model, self.store = model, SlabStore(model.cache_layout, 4096)

    def step(self, *rows: Row) -> Tensor:
        cache = self.store.begin([row.extent for row in rows])
        logits = tensor_of(self.model.forward(flatten(list(rows), cache)))
        self.store.commit([row.extent for row in rows])
        return logits


class HalfLinear(DenseLinear):
    """Weights that `--quant f16` rounds."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(weight.half().float(), bias)


ORACLES = {"f16": HalfLinear, "int8": ExactInt8Linear}


def loaded(folder: Path, quant: str | None, monkeypatch: pytest.MonkeyPatch, native: bool) -> Running:
    """With `quant` in C++; in torch the reference, whose layers and tables are as exact as `quant` has them."""
    monkeypatch.setenv(SWITCH, str(int(native)))
    if quant is not None and not native:
        plain = layers.packing
        monkeypatch.setattr(layers, "DenseLinear", ORACLES[quant])
        monkeypatch.setattr(
            torch_loading, "packing", lambda _, *rest: replace(plain(None, *rest), packed=True, quantized=True)
        )
        quant = None
    with capture_logs() as logs:
        running = Running(load(folder, collective=Solo(), dtype="float32", quant=quant))
    assert ("the forward runs in C++" in [entry["event"] for entry in logs]) == native
    return running


def conversation(running: Running) -> Tensor:
    """Prompts together, decoding, a newcomer's prompt beside decoding and a chunk, and one that has left."""
    found = [running.step(Row(0, PROMPT[:40], 0, True), Row(1, PROMPT[:7], 0, True))]
    found += [running.step(Row(0, [3 + i], 40 + i, True), Row(1, [9 + i], 7 + i, True)) for i in range(3)]
    found.append(running.step(Row(0, [5], 43, True), Row(2, PROMPT[:20], 0, False), Row(1, PROMPT[:9], 10, True)))
    running.store.drop(0)
    found.append(running.step(Row(1, [8], 19, True), Row(2, PROMPT[20:24], 20, True)))
    return torch.cat(found)


@pytest.mark.parametrize("quant", list(NEAR))
@pytest.mark.parametrize("family", sorted(name for name, family in FAMILIES.items() if family.is_native))
def test_it_says_what_torch_says(
    family: str, quant: str | None, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each family's logits are those of torch's forward, with every kind of weights."""
    ours, theirs = (conversation(loaded(checkpoint(family), quant, monkeypatch, native)) for native in (True, False))
    difference = (ours - theirs).abs()
    if quant == "int8" and FAMILIES[family].latent:
        # The matrices of heads keep 16 bits in C++, so tokens may go to other experts.
        assert difference.mean() < 0.3 < theirs.std()
    else:
        assert difference.max() < NEAR[quant]


@pytest.mark.parametrize("quant", list(NEAR))
@pytest.mark.parametrize(
    "family",
    [
        *("apertus", "cohere2", "gemma3_text", "gemma4_text", "glm4", "glm4_moe", "granitemoehybrid", "lfm2"),
        *("ministral3", "mistral", "olmo3", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next"),
    ],
)
def test_a_sequence_has_the_same_bits_in_any_company(
    family: str, quant: str | None, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and token by token, or in chunks beside other sequences: not one bit of its logits differs."""
    running = loaded(checkpoint(family), quant, monkeypatch, native=True)
    alone = [running.step(Row(0, [token], at, True))[0] for at, token in enumerate(PROMPT)]
    running.step(*(Row(sid, PROMPT[sid : sid + 20 + sid], 0, True) for sid in range(1, 10)))
    chunked = running.step(Row(10, PROMPT[:33], 0, True), *(Row(s, [s], 20 + s, True) for s in range(1, 10)))[0]
    assert torch.equal(chunked, alone[32])
    rest = running.step(*(Row(s, [s], 21 + s, True) for s in range(1, 10)), Row(10, PROMPT[33:], 33, True))[-1]
    assert torch.equal(rest, alone[-1])


def test_values_are_taken_block_by_block(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention takes 32 KiB of values at a time. Over several such blocks the logits are torch's, and those of a whole
    prompt and of its chunks have the same bits."""
    ours = loaded(checkpoint("qwen3"), None, monkeypatch, native=True)
    block = 32 * 1024 // (4 * ours.model.cache_layout.layers[0].head_dim)
    prompt = PROMPT * (2 * block // len(PROMPT) + 1)
    whole = ours.step(Row(0, prompt, 0, True))
    middle = len(prompt) // 2 + 1
    ours.step(Row(1, prompt[:middle], 0, False))
    assert torch.equal(ours.step(Row(1, prompt[middle:], middle, True)), whole)
    theirs = loaded(checkpoint("qwen3"), None, monkeypatch, native=False).step(Row(0, prompt, 0, True))
    assert (whole - theirs).abs().max() < NEAR[None]


@pytest.mark.parametrize("family", ["granitemoehybrid", "lfm2", "qwen3", "qwen3_moe", "qwen3_next"])
def test_threads_share_a_step_without_changing_it(
    family: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread, two and five, more than there are processors, give the same bits."""
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            found.append(conversation(loaded(checkpoint(family), None, monkeypatch, native=True)))
        finally:
            torch.set_num_threads(1)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_a_forked_child_has_threads_of_its_own(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child of a process whose threads run steps goes on with the same answers, and a signal ends it at once."""
    torch.set_num_threads(2)
    try:
        running = loaded(checkpoint("qwen3"), None, monkeypatch, native=True)
    finally:
        torch.set_num_threads(1)
    logits = running.step(Row(0, PROMPT, 0, True))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a command that ran in this process may have left its handler
        os.write(writing, b"=" if torch.equal(running.step(Row(1, PROMPT, 0, True)), logits) else b"!")
        signal.pause()
    assert os.read(reading, 1) == b"="
    os.kill(child, signal.SIGTERM)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
    os.close(reading)
    os.close(writing)
    assert torch.equal(running.step(Row(2, PROMPT, 0, True)), logits)


def test_a_sequence_gone_bad_is_seen(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN among a sequence's keys makes its own logits NaN and leaves those beside it as they are."""
    running = loaded(checkpoint("qwen3"), None, monkeypatch, native=True)
    logits = running.step(Row(0, PROMPT, 0, True), Row(1, PROMPT, 0, True))
    slab = running.store._slabs[1]
    slab.pool.memories[0][1, 0, slab.slot, 0, 5] = float("nan")
    step_logits = running.step(Row(0, [3], 60, True), Row(1, [3], 60, True))
    assert step_logits[0].isfinite().all()
    assert logits.isfinite().all()
    assert step_logits[1].isnan().all()


def test_a_model_beyond_its_record_is_left_to_torch(tmp_path: Path) -> None:
    """The C++ forward takes heads of whole vectors; other heads run in torch, and the log says why."""
    folder = models.make("qwen3", tmp_path, head_dim=24)
    with capture_logs() as logs:
        running = Running(load(folder, collective=Solo(), dtype="float32"))
    assert [entry["reason"] for entry in logs if entry["event"] == "torch runs the forward"]
    assert running.step(Row(0, PROMPT, 0, True)).isfinite().all()


@pytest.mark.parametrize(
    ("family", "quant"),
    [
        ("qwen3", None),
        ("qwen3", "int8"),
        ("apertus", "int8"),
        ("cohere", None),
        ("gemma3_text", None),
        ("gemma4_text", None),
        ("gemma4_text", "f16"),
        ("glm4_moe", None),
        ("granite", None),
        ("granitemoehybrid", None),
        ("granitemoehybrid", "f16"),
        ("lfm2", None),
        ("minimax_m2", None),
        ("mixtral", None),
        ("olmo2", None),
        ("phi", "int8"),
        ("qwen3_moe", "int8"),
        ("qwen3_5_text", "f16"),
        ("qwen3_next", None),
    ],
)
def test_two_ranks_step_together(family: str, quant: str | None, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    """Two ranks that sum inside of their steps answer as one does, after as many exchanges on each."""
    folder, jobs = checkpoint(family), write([Job(1, PROMPT, 16, 6), Job(2, PROMPT[:9], 8, 6, start=2)])
    alone = load(folder, collective=Solo(), dtype="float32", quant=quant)
    expected = play(Engine(alone, SlabStore(alone.cache_layout, 4096), Solo()), jobs)
    ranks.form(2)
    ranks.ask("load", folder, "float32", quant)
    first, second = ranks.ask("play", jobs)
    assert first.is_native and second.is_native
    assert second.checksums == first.checksums
    assert second.collectives == first.collectives > 0
    for ours, theirs in zip(first.logits[1], expected.logits[1], strict=False):
        assert (ours - theirs).abs().max() < NEAR[quant]


def test_a_forward_shows_its_progress(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several times in each layer, on either way, and not at all where nothing runs: another thread reads it."""
    for native in (True, False):
        running = loaded(checkpoint("llama"), None, monkeypatch, native)
        before = running.model.progress
        assert before == running.model.progress
        running.step(Row(0, PROMPT, 0, True))
        assert running.model.progress - before >= len(running.model.cache_layout.layers)
