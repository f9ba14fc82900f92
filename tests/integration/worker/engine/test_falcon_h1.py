"""falcon_h1 gives the tokens of generate in other forms: norms, biases and groups that ranks share."""

from __future__ import annotations

import functools
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
    "without a norm": {"mamba_rms_norm": False, "mamba_n_groups": 1},
    "norm before the gate": {"mamba_norm_before_gate": True, "mamba_n_groups": 1, "mamba_conv_bias": False},
    "biases": {
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "attention_in_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "mamba_d_ssm": None,
        "mamba_n_heads": 8,
    },
}


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: models.make("falcon_h1", tmp_path_factory.mktemp("form"), **FORMS[name]))


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
    """The same of two ranks, which sum the squares of a group that both have a part of."""
    folder, jobs = form(name), mixed()
    ranks.form(2)
    ranks.ask("load", folder, "float64")
    assert_identical(folder, jobs, ranks.ask("play", write(jobs))[0])
    ranks.ask("load", folder, "float32")
    assert_close(folder, jobs, ranks.ask("play", write(jobs))[0])
