"""llama4 gives the tokens of generate in other forms: without norms, experts in every other layer, lists left out."""

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
    "Maverick": {
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
        "attention_bias": True,
        "num_experts_per_tok": 1,
        "no_rope_layers": None,
        "no_rope_layer_interval": 3,
        "moe_layers": None,
        "interleave_moe_layer_step": 2,
    },
    "one rotated layer": {"no_rope_layers": [0, 0, 1, 0], "attention_chunk_size": 7},
}


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a form, made once. That of Maverick has empty lists, or none, as published files do."""

    def made(name: str) -> Path:
        folder = models.make("llama4_text", tmp_path_factory.mktemp("form"), **FORMS[name])
        file = folder / "config.json"
        config = json.loads(file.read_text())
        if name == "Maverick":
            file.write_text(json.dumps(config | {"no_rope_layers": [], "moe_layers": None, "layer_types": None}))
        return folder

    return functools.cache(made)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_one_rank(name: str, form: Callable[[str], Path]) -> None:
    """Greedy float64 tokens are generate's, and float32 logits in C++ are within 1e-4 of transformers' forward."""
    folder, jobs = form(name), mixed()
    assert_identical(folder, jobs, play(engine_of(folder, "float64"), write(jobs)))
    engine = engine_of(folder, "float32")
    assert load_library() is None or engine.model.is_native
    assert_close(folder, jobs, play(engine, write(jobs)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_two_ranks(name: str, form: Callable[[str], Path], ranks: RankGroup) -> None:
    """The same of two ranks."""
    folder, jobs = form(name), mixed()
    ranks.form(2)
    ranks.ask("load", folder, "float64")
    assert_identical(folder, jobs, ranks.ask("play", write(jobs))[0])
    ranks.ask("load", folder, "float32")
    assert_close(folder, jobs, ranks.ask("play", write(jobs))[0])
