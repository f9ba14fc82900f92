"""Models of GGUF files beside transformers on the numbers that their weights are."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests import gguf_models
from tests.integration.worker.engine.parity import assert_identical, mixed, reference, solo
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import write
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.layers.linear import NativeLinear
from worker.models.loading import load
from worker.native import library

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
MODELS: dict[str, tuple[list[str], dict[str, object]]] = {
    "llama": (["q8_0", "f16", "q4_0", "bf16"], {"rope_parameters": LLAMA3, "head_dim": 64, "hidden_size": 128}),
    "qwen2": (["q5_1", "q8_0"], {"tie_word_embeddings": False}),
    "qwen3": (["q8_0", "q4_1", "q5_0"], {}),
    "qwen3_moe": (["f16", "q8_0"], {"mlp_only_layers": [], "moe_intermediate_size": 96}),
    "gpt_oss": (["mxfp4", "q8_0"], {"swiglu_limit": 7.0}),
    "gemma3_text": (["q6_k", "q4_k", "q3_k"], {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 6}),
}
"""Types and shape by family; the sixth layer of a gemma3 is the first that attends to all positions."""


@cache
def made(family: str, folder: Path) -> tuple[Path, Path]:
    kinds, changes = MODELS[family]
    inner = 256 if family == "gemma3_text" else 96
    if family == "gemma3_text":
        changes = changes | {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "query_pre_attn_scalar": 64}
    return gguf_models.make(family, folder, kinds, **({"intermediate_size": inner} | changes))


@cache
def tame(family: str, folder: Path) -> tuple[Path, Path]:
    """Weights of a trained model's scale: those of the parity tests make another answer of any rounding. Feed-forward
    widths have three blocks, so that two ranks' shares differ."""
    kinds, changes = MODELS[family]
    wide = (
        {"intermediate_size": 768, "num_attention_heads": 8} if family == "gemma3_text" else {"intermediate_size": 96}
    )
    if family == "gemma3_text":
        wide |= {"layer_types": ["sliding_attention"] * 5 + ["full_attention"], "query_pre_attn_scalar": 64}
    quiet = {"initializer_range": 0.05, "norm_noise": 0.1}
    return gguf_models.make(family, folder, kinds, size=0.3, **(wide | changes | quiet))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.mark.parametrize("family", sorted(MODELS))
def test_dequantised_tokens_equal_those_of_generate(family: str, folder: Path) -> None:
    """Greedy float64 tokens, alone in chunks of 8, 16 and whole, and in a mixed batch."""
    file, plain = made(family, folder / family)
    model = load(file, collective=Solo(), dtype="float64", dequantize=True)
    engine = Engine(model, SlabStore(model.cache_layout, 4096), Solo())
    for jobs in [*(solo(37, chunk) for chunk in (8, 16, 512)), mixed()]:
        assert_identical(plain, jobs, play(engine, write(jobs)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", sorted(MODELS))
def test_two_ranks_equal_generate(family: str, folder: Path, ranks: RankGroup) -> None:
    file, plain = made(family, folder / family)
    ranks.form(2)
    ranks.ask("load", file, "float64", None, True)
    jobs = mixed()
    first, second = ranks.ask("play", write(jobs))
    assert_identical(plain, jobs, first)
    assert second.tokens == first.tokens


def cosine(plain: Path, outcome: Any) -> float:
    """Of the logits of all sampled positions, with those of transformers on the tokens that were chosen."""
    pairs: list[tuple[Any, Any]] = []
    for job in mixed():
        tokens = outcome.tokens[job.sid]
        with torch.no_grad():
            whole = reference(plain, torch.float32)(torch.tensor([job.prompt + tokens[:-1]])).logits[0]
        pairs.append((torch.stack(outcome.logits[job.sid]), whole[len(job.prompt) - 1 :]))
    ours, theirs = (torch.cat(side).flatten() for side in zip(*pairs, strict=True))
    return float(functional.cosine_similarity(ours, theirs, dim=0))


@pytest.fixture
def compiled() -> None:
    if library.library() is None:
        pytest.skip("no C++ compiler: blocks are computed in C++ only")


@pytest.mark.parametrize("family", sorted(MODELS))
def test_packed_weights_are_near_the_dequantised_ones(family: str, folder: Path, compiled: None) -> None:
    """Blocks stay blocks, embedding and head included, and the logits point where transformers' do."""
    file, plain = tame(family, folder / f"tame-{family}")
    model = load(file, collective=Solo())
    outcome = play(Engine(model, SlabStore(model.cache_layout, 4096), Solo()), write(mixed()))
    assert cosine(plain, outcome) >= 0.999
    plain_bytes = load(file, collective=Solo(), dequantize=True).weight_bytes
    assert model.weight_bytes < 0.95 * plain_bytes and any(isinstance(part, NativeLinear) for part in model.parts())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("family", sorted(MODELS))
def test_two_ranks_share_packed_weights(family: str, folder: Path, ranks: RankGroup, compiled: None) -> None:
    file, plain = tame(family, folder / f"tame-{family}")
    ranks.form(2)
    shares = ranks.ask("load", file, "float32")
    assert max(shares) > 1.05 * min(shares)  # one and two blocks of the feed-forward widths
    first, second = ranks.ask("play", write(mixed()))
    assert cosine(plain, first) >= 0.999
    assert second.tokens == first.tokens
