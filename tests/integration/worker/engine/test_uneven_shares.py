"""Ranks with uneven shares compute what one computes: shares of the heads and widths of a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.nn import functional

from control.errors import UnsupportedArchitecture
from tests import models
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import Job, write
from tests.integration.worker.engine.test_loading import Membership
from worker.collective import Solo
from worker.engine.step import Engine
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.native.library import load_library
from worker.weights.cache import WeightCache

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C++ compiler, or a processor without AVX2")

PROMPT = [number * 7 % 120 + 3 for number in range(60)]
JOBS = [Job(1, PROMPT, 16, 6), Job(2, PROMPT[:9], 8, 6, start=2)]
NEAR = {None: 1e-4, "f16": 1e-3, "int8": 0.6}
"""As two even ranks are near one."""
FAMILIES = [
    ("llama", None),
    ("llama", "int8"),
    ("qwen3", "f16"),
    ("gemma2", None),
    ("gemma3_text", None),
    ("glm4_moe", None),
    ("mixtral", None),
    ("phi3", None),
    ("qwen2", None),
    ("qwen3_moe", "int8"),
    ("starcoder2", None),
]

Form = Callable[..., Path]


def group() -> Any:
    """The first rank of two that do not meet."""
    return Membership(0, 2)


@pytest.fixture
def form(tmp_path: Path) -> Form:
    """A model with so many key-value heads, and twice as many heads."""

    def make(family: str, heads: int = 4) -> Path:
        return models.make(family, tmp_path / family, num_key_value_heads=heads, num_attention_heads=2 * heads)

    return make


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("family", "quant"), FAMILIES)
@pytest.mark.parametrize("shares", [(3, 1), (1, 3)])
def test_uneven_ranks_step_as_one(
    family: str, quant: str | None, shares: tuple[int, int], form: Form, ranks: RankGroup
) -> None:
    folder, script = form(family), write(JOBS)
    alone = load(folder, collective=Solo(), dtype="float32", quant=quant)
    expected = play(Engine(alone, SlabStore(alone.cache_layout, 4096), Solo()), script)
    ranks.form(2)
    weights = ranks.ask("load", folder, "float32", quant, False, shares)
    slabs = ranks.ask("slab_bytes", 256)
    first, second = ranks.ask("play", script)
    assert first.is_native and second.is_native
    assert second.checksums == first.checksums
    for sid in (1, 2):
        steps = len(first.logits[sid]) if quant is None else 1  # with 8 bits another token may follow
        for ours, theirs in zip(first.logits[sid][:steps], expected.logits[sid], strict=False):
            assert (ours - theirs).abs().max() < NEAR[quant]
    large, small = (0, 1) if shares[0] > shares[1] else (1, 0)
    assert weights[large] > weights[small] and slabs[large] == 3 * slabs[small]


WIDE = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64, "initializer_range": 0.03, "norm_noise": 0.1}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("quant", ["q4_0", "q4k"])
@pytest.mark.parametrize("shares", [(3, 1), (1, 2, 1)])
def test_shares_end_where_blocks_do(quant: str, shares: tuple[int, ...], tmp_path: Path, ranks: RankGroup) -> None:
    """Each rank's part of a row-parallel matrix has whole blocks; a new group goes on identically."""
    heads = {"num_key_value_heads": 4, "num_attention_heads": 16}
    folder, script = models.make("qwen3", tmp_path / "wide", **WIDE, **heads), write([Job(1, PROMPT, 16, 1)])
    alone = load(folder, collective=Solo(), dtype="auto", quant=quant)
    expected = play(Engine(alone, SlabStore(alone.cache_layout, 4096), Solo()), script)
    ranks.form(len(shares))
    ranks.ask("load", folder, "auto", quant, False, shares)
    outcomes = ranks.ask("play", script)
    ours, theirs = outcomes[0].logits[1][0], expected.logits[1][0]
    assert functional.cosine_similarity(ours, theirs, dim=0) > 0.999
    before = ranks.ask("play", write(JOBS))
    ranks.form(len(shares))
    assert [one.checksums for one in ranks.ask("play", write(JOBS))] == [one.checksums for one in before]


def test_packed_weights_of_other_shares_are_not_taken(
    form: Form, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are those of even ones."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = form("llama")
    cache = WeightCache(2**30, least=0)
    sizes: list[int] = []
    for shares in ((), (3, 1), (1, 3), (3, 1)):
        model = load(folder, collective=group(), dtype="float32", quant="int8", cache=cache, shares=shares)
        sizes.append(model.weight_bytes)
        if cache.writing is not None:
            cache.writing.join()
    assert len(list((tmp_path / "cache").rglob("*.weights"))) == 3
    assert sizes[1] == sizes[3] and len(set(sizes)) == 3


@pytest.mark.parametrize(
    ("family", "shares", "why"),
    [
        ("llama", (3, 2), "can't be divided"),
        ("llama", (4, 4), "key-value heads can't be divided into 8 units"),
        ("llama", (2, 1, 1), "not those of 2 ranks"),
        ("llama", (4, 0), "one unit at least"),
        ("olmo2", (3, 1), "have even shares"),
        ("qwen3_next", (3, 1), "have even shares"),
    ],
)
def test_shares_that_no_ranks_can_have_are_refused(family: str, shares: tuple[int, ...], why: str, form: Form) -> None:
    """What as many even ranks as units could not share; families whose ranks sum norms or keep states."""
    with pytest.raises(UnsupportedArchitecture, match=why):
        load(form(family), collective=group(), dtype="float32", shares=shares)


def test_torch_computes_even_shares_alone(form: Form) -> None:
    with pytest.raises(UnsupportedArchitecture, match="a model that C\\+\\+ computes"):
        load(form("llama"), collective=group(), dtype="float64", shares=(3, 1))
