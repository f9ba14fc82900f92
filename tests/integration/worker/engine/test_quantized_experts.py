"""Experts of quantized checkpoints keep tokens and width: their formulas' weights."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests import quantized
from tests.integration.worker.engine.parity import (
    assert_close,
    assert_identical,
    assert_same_bits_in_company,
    engine_of,
    mixed,
    prompt,
)
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from worker.models.shard import open_checkpoint
from worker.native.host import SWITCH
from worker.native.library import load_library
from worker.repository.files import inspect
from worker.weights.stored_matrix import StoredMatrix

Written = Callable[[str, str], tuple[Path, Path]]

MIXTURES = [
    ("gpt_oss", "mxfp4"),
    ("qwen3_5_moe_text", "fp8 by block"),
    ("qwen3_moe", "awq"),
    ("qwen3_5_moe_text", "w4a16"),
    ("mixtral", "gptq"),
]
SHAPE = {"moe_intermediate_size": 192, "shared_expert_intermediate_size": 64, "intermediate_size": 192}
"""Three blocks of 64 or six groups of 32."""


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """(stored, plain) of a family and a kind, made once."""

    def made(family: str, kind: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(f"{family}-{kind.replace(' ', '-')}")
        if kind == "mxfp4":
            return quantized.write_mxfp4(folder)
        return quantized.write(folder, kind, family, **SHAPE)

    return functools.cache(made)


def test_experts_in_mxfp4_are_those_of_the_formula(written: Written) -> None:
    """Each expert's matrices, whole and a share of them, have the bits of transformers' dequantisation."""
    stored, plain = written("gpt_oss", "mxfp4")
    exact = load_file(plain / "model.safetensors")
    with open_checkpoint(inspect(stored), dequantize=False) as checkpoint:
        for expert in range(4):
            stem = "model.layers.1.mlp.experts"
            both, down = exact[f"{stem}.gate_up_proj"][expert].T, exact[f"{stem}.down_proj"][expert].T
            for part, wanted in (("gate", both[0::2]), ("up", both[1::2]), ("down", down)):
                name = f"{stem}.{expert}.{part}_proj.weight"
                whole = checkpoint.read(name)
                assert isinstance(whole, StoredMatrix)
                assert torch.equal(torch.from_numpy(whole.dequantized(np.float64)), wanted)
                rows, columns = (checkpoint.read(name, dim, [(32, 64)]) for dim in (0, 1))
                assert torch.equal(torch.from_numpy(rows.dequantized(np.float64)), wanted[32:64])
                assert torch.equal(torch.from_numpy(columns.dequantized(np.float64)), wanted[:, 32:64])


@pytest.mark.parametrize(("family", "kind"), MIXTURES)
def test_tokens_are_those_of_the_dequantized_weights(family: str, kind: str, written: Written) -> None:
    """Greedy float64 tokens equal transformers' on the plain weights, in chunks and in company, beyond the window."""
    stored, plain = written(family, kind)
    jobs = mixed()
    assert_identical(plain, jobs, play(engine_of(stored, "float64"), write(jobs)))


@pytest.mark.parametrize(
    ("family", "kind", "native"), [*((*one, True) for one in MIXTURES), ("gpt_oss", "mxfp4", False)]
)
def test_logits_in_float32(
    family: str, kind: str, native: bool, written: Written, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are within 1e-4 of transformers' forward on the plain weights, in C++ and in torch."""
    monkeypatch.setenv(SWITCH, str(int(native)))
    stored, plain = written(family, kind)
    jobs = [Job(1, prompt(21), 8, 4), Job(2, prompt(37), 512, 4, start=1)]
    engine = engine_of(stored, "auto")
    assert engine.model.is_native == (native and load_library() is not None)
    assert_close(plain, jobs, play(engine, write(jobs)))


@pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")
@pytest.mark.parametrize(("family", "kind"), [*MIXTURES[:2], ("qwen3_moe", "w8a8")])
def test_a_sequence_has_the_same_bits_in_any_company(family: str, kind: str, written: Written) -> None:
    """In C++ a sequence's logits alone, token by token, are those in chunks beside others."""
    assert_same_bits_in_company(written(family, kind)[0])


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("family", "kind"), MIXTURES)
def test_two_ranks_share_whole_groups(family: str, kind: str, written: Written, ranks: RankGroup) -> None:
    """Two ranks, of which in mxfp4 and fp8 one has more groups, give transformers' tokens on the plain weights, and in
    float32 its logits within 1e-4."""
    stored, plain = written(family, kind)
    ranks.form(2)
    ranks.ask("load", stored, "float64")
    jobs = mixed()
    first, second = ranks.ask("play", write(jobs))
    assert_identical(plain, jobs, first)
    assert second.checksums == first.checksums
    short = [Job(1, prompt(21), 16, 3)]
    ranks.ask("load", stored, "float32")
    assert_close(plain, short, ranks.ask("play", write(short))[0])
