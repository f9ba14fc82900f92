"""Models of GGUF files beside transformers on the numbers that their weights are."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests import gguf_models
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import write
from tests.integration.worker.engine.test_parity import assert_identical, mixed, solo
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load

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
    "qwen3_moe": (["q8_0", "f16"], {"mlp_only_layers": [], "moe_intermediate_size": 64}),
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
