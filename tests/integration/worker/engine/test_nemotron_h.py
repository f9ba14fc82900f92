"""nemotron_h gives the tokens of generate in other forms: without experts, with biases, with fields of older files."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import models
from tests.integration.worker.engine.parity import assert_close, assert_identical, engine_of, mixed
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import write
from worker.native.library import load_library

FORMS: dict[str, dict[str, Any]] = {
    "dense": {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "n_groups": 1},
    "biases": {"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "head_dim": 32},
    "latent experts": {"moe_latent_size": 48},
}
LETTERS = {"linear_attention": "M", "mlp": "-", "full_attention": "*", "moe": "E"}


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a form, made once. That of the dense one has the fields of published files."""

    def made(name: str) -> Path:
        folder = models.make("nemotron_h", tmp_path_factory.mktemp("form"), **FORMS[name])
        file = folder / "config.json"
        config = json.loads(file.read_text())
        if name == "dense":
            kinds = config.pop("layers_block_type")
            config |= {"hybrid_override_pattern": "".join(map(LETTERS.__getitem__, kinds)), "num_hidden_layers": 4}
            config["mamba_n_groups"] = config.pop("n_groups")
            file.write_text(json.dumps(config))
        return folder

    return functools.cache(made)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_one_rank(name: str, form: Callable[[str], Path]) -> None:
    """Greedy float64 tokens are generate's; float32 logits, in C++ but for latent experts, are within 1e-4 of
    transformers' forward."""
    folder, jobs = form(name), mixed()
    assert_identical(folder, jobs, play(engine_of(folder, "float64"), write(jobs)))
    engine = engine_of(folder, "float32")
    assert load_library() is None or engine.model.is_native == (name != "latent experts")
    assert_close(folder, jobs, play(engine, write(jobs)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_two_ranks(name: str, form: Callable[[str], Path], ranks: RankGroup) -> None:
    """The same of two ranks, which sum the squares of a group that both have a part of."""
    folder, jobs = form(name), mixed()
    ranks.form(2)
    ranks.ask("load", folder, "float64")
    assert_identical(folder, jobs, ranks.ask("play", write(jobs))[0])
    ranks.ask("load", folder, "float32")
    assert_close(folder, jobs, ranks.ask("play", write(jobs))[0])
