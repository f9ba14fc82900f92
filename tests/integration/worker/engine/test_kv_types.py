"""KV in 16 and 8 bits is near 32: the same to the last bit in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from control.errors import SettingsError
from ops.demo import MODEL_DIR
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.stepping import tensor_of
from tests.integration.worker.engine.test_guesses import NEW, guessed, one_by_one
from tests.integration.worker.engine.test_guesses import kept as kept_tokens
from tests.integration.worker.engine.test_native import PROMPT, Running
from tests.integration.worker.engine.test_quant import held_out_texts, perplexity
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.base import STORED_TYPES, CacheLayout
from worker.kv.slabs import SlabStore
from worker.models.backend import describe
from worker.models.loading import load
from worker.models.served import Row
from worker.native.host import SWITCH
from worker.native.library import load_library

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")

Checkpoint = Callable[[str], Path]

SHORTER = ["f16", "bf16", "q8_0"]
SAMPLE = [
    "deepseek_v3",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "granitemoehybrid",
    "lfm3",
    "mimo_v2_flash",
    "minimax_m2",
    "qwen3",
]
"""Compressed rows, heads of several widths, windows, sinks, recurrent layers beside, narrow values, norms over
all heads."""


def running(folder: Path, kv_type: str) -> Running:
    return Running(load(folder, collective=Solo(), dtype="float32", kv_type=kv_type))


def spoil(memory: NDArray[Any]) -> None:
    memory.view(np.uint8)[:] = 0xFF  # NaN in every type


@pytest.mark.parametrize("kv_type", SHORTER)
@pytest.mark.parametrize("family", SAMPLE)
def test_a_sequence_has_the_same_bits_in_any_company(
    family: str, kv_type: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and token by token, in chunks beside others, and as the copy of another's beginning. What was freed behind
    windows may hold anything."""
    monkeypatch.setattr("worker.kv.slabs.discard", spoil)
    model = running(checkpoint(family), kv_type)
    alone = [model.step(Row(0, [token], at, True))[0] for at, token in enumerate(PROMPT)]
    model.step(*(Row(sid, PROMPT[sid : sid + 20 + sid], 0, True) for sid in range(1, 10)))
    chunked = model.step(Row(10, PROMPT[:33], 0, True), *(Row(s, [s], 20 + s, True) for s in range(1, 10)))[0]
    assert torch.equal(chunked, alone[32])
    if model.store.can_fork(10, 33):
        model.store.fork(11, 10, 33, take_over=False)
        assert torch.equal(model.step(Row(11, PROMPT[33:], 33, True))[-1], alone[-1])
    rest = model.step(*(Row(s, [s], 21 + s, True) for s in range(1, 10)), Row(10, PROMPT[33:], 33, True))[-1]
    assert torch.equal(rest, alone[-1])


@pytest.mark.parametrize(("kv_type", "near"), [("f16", 0.9999), ("bf16", 0.999), ("q8_0", 0.999)])
@pytest.mark.parametrize("family", SAMPLE)
def test_logits_are_near_those_with_32_bits(family: str, kv_type: str, near: float, checkpoint: Checkpoint) -> None:
    shorter, exact = (running(checkpoint(family), one).step(Row(0, PROMPT, 0, True))[0] for one in (kv_type, "f32"))
    assert not torch.equal(shorter, exact)
    assert torch.cosine_similarity(shorter.double(), exact.double(), dim=0) >= near


@pytest.mark.parametrize(("kv_type", "share"), [("f16", 0.5), ("bf16", 0.5), ("q8_0", 0.28)])
def test_bytes_of_a_token(kv_type: str, share: float) -> None:
    """Also where blocks of 32 divide no head."""
    sizes = {}
    for one in (kv_type, "f32"):
        layout = load(MODEL_DIR, collective=Solo(), kv_type=one).cache_layout
        assert isinstance(layout, CacheLayout)
        sizes[one] = layout.bytes_per_token
    assert sizes[kv_type] <= share * sizes["f32"]
    assert [STORED_TYPES["q8_0"].row(dim) for dim in (16, 48, 128)] == [18, 52, 136]


@pytest.mark.parametrize("kv_type", SHORTER)
def test_perplexity_beside_32_bits(kv_type: str) -> None:
    """Of the demonstration model, on conversations that it never saw."""
    texts = held_out_texts(per_task=8)
    shorter, exact = (perplexity(load(MODEL_DIR, collective=Solo(), kv_type=one), texts) for one in (kv_type, "f32"))
    assert shorter / exact <= {"f16": 1.001}.get(kv_type, 1.005)


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("family", ["gemma3_text", "granitemoehybrid"])
def test_guesses_leave_the_bits_as_they_are(family: str, kv_type: str, checkpoint: Checkpoint) -> None:
    model = load(checkpoint(family), collective=Solo(), dtype="float32", kv_type=kv_type)
    engine = Engine(model, SlabStore(model.cache_layout, 4096), Solo())
    expected = play(engine, one_by_one())
    engine.clear()
    assert kept_tokens(play(engine, guessed(expected.tokens[1]))) == expected.tokens[1]
    assert engine.store.length(1) == len(PROMPT[:40]) + NEW - 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_two_ranks_say_what_one_says(kv_type: str, checkpoint: Checkpoint, ranks: RankGroup) -> None:
    jobs = [Job(1, PROMPT[:30], 8, 6), Job(2, PROMPT[:20], 16, 6, start=2)]
    ranks.form(2)
    ranks.ask("load", checkpoint("qwen3"), "float32", None, False, (), kv_type)
    first, second = ranks.ask("play", write(jobs))
    assert first.checksums == second.checksums
    model = load(checkpoint("qwen3"), collective=Solo(), dtype="float32", kv_type=kv_type)
    alone = play(Engine(model, SlabStore(model.cache_layout, 4096), Solo()), write(jobs))
    for sid, rows in alone.logits.items():
        for ours, theirs in zip(first.logits[sid], rows, strict=True):
            assert torch.cosine_similarity(ours.double(), theirs.double(), dim=0) >= 0.999


def test_infinity_is_not_hidden(checkpoint: Checkpoint) -> None:
    """A key beyond the range of 16 bits makes the answer fail; it is never another number."""
    model = load(checkpoint("qwen3"), collective=Solo(), dtype="float32", kv_type="f16")
    running = Running(model)
    running.step(Row(0, PROMPT[:8], 0, True))
    memory = running.store._pools[256][0].memories[0]
    memory[0, 0, :, :, :8] = float("inf")
    assert not tensor_of(running.step(Row(0, [5], 8, True))).isfinite().all()


def test_the_type_is_a_part_of_the_fingerprint(checkpoint: Checkpoint) -> None:
    described = {one: describe(load(checkpoint("qwen3"), collective=Solo(), kv_type=one)) for one in STORED_TYPES}
    assert {name: one.kv_type for name, one in described.items()} == {name: name for name in STORED_TYPES}


def test_compressed_rows_are_stored_once(checkpoint: Checkpoint) -> None:
    """They are keys and values."""
    layout = load(checkpoint("deepseek_v3"), collective=Solo(), dtype="float32", kv_type="f16").cache_layout
    assert isinstance(layout, CacheLayout)
    assert layout.bytes_per_token == sum(2 * one.head_dim for one in layout.layers)


def test_a_farm_keeps_16_bits_by_default_and_vectors_32(checkpoint: Checkpoint) -> None:
    layout = load(checkpoint("qwen3"), collective=Solo(), kv_type="auto").cache_layout
    assert isinstance(layout, CacheLayout) and layout.stored == STORED_TYPES["f16"]


def test_torch_refuses_a_type_that_it_does_not_store(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    with pytest.raises(SettingsError, match="torch computes this model, and stores keys and values in float32"):
        load(checkpoint("qwen3"), collective=Solo(), kv_type="q8_0")
    layout = load(checkpoint("qwen3"), collective=Solo(), kv_type="f32").cache_layout
    assert isinstance(layout, CacheLayout) and layout.stored is None
