"""Types give the tokens of generate in other forms: lists left out, switches, wide values, heads of their own."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests import models
from tests.integration.worker.engine.parity import assert_close, assert_identical, engine_of, mixed
from tests.integration.worker.engine.ranks import RankGroup, play
from tests.integration.worker.engine.script import write
from worker.native.library import load_library

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of 0 shared experts


@dataclass(frozen=True)
class Form:
    family: str
    changes: dict[str, Any]
    written: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of config.json as published files have them; null: left out."""
    native: bool = True
    """True if C++ computes it."""
    doubled: bool = False
    """True if the head is stored as the embedding once more."""


FORMS = {
    "gemma3n, another active stream": Form(
        "gemma3n_text", {"altup_active_idx": 2, "altup_correct_scale": False, "num_kv_shared_layers": 0}
    ),
    "gemma, a head beside a tied embedding": Form(
        "gemma", {"tie_word_embeddings": False}, {"tie_word_embeddings": True}
    ),
    "gemma3n, kinds by number": Form(
        "gemma3n_text",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 1,
            "layer_types": None,
            "activation_sparsity_pattern": None,
            "intermediate_size": [90] * 6,
        },
        {"layer_types": None, "activation_sparsity_pattern": None, "rope_parameters": None},
    ),
    "glm4_moe, no shared expert": Form("glm4_moe", {"n_shared_experts": 0}, native=False),
    "gemma, the embedding twice": Form("gemma", {}, {"tie_word_embeddings": True}, doubled=True),
    "lfm2, a head beside a tied embedding": Form(
        "lfm2", {"tie_word_embeddings": False}, {"tie_word_embeddings": None, "tie_embedding": True}
    ),
    "lfm3, kinds by number": Form(
        "lfm3", {"num_hidden_layers": 6, "layer_types": None, "conv_bias": False}, {"layer_types": None}
    ),
    "lfm3, no gates": Form("lfm3", {"use_attention_gate": False, "attention_bias": True}),
    "lfm3, norms before alone": Form("lfm3", {"use_sandwich_norm": False, "tie_word_embeddings": False}),
    "lfm3, biased": Form("lfm3", {"attention_bias": True}, native=False),
    "mimo, kinds by number": Form(
        "mimo_v2_flash",
        {
            "num_hidden_layers": 6,
            "layer_types": None,
            "mlp_layer_types": None,
            "attention_value_scale": 0.7,
            "routed_scaling_factor": None,
            "norm_topk_prob": False,
        },
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "rope_parameters": None,
            "sliding_window": 11,
            "sliding_window_size": 11,
        },
    ),
    "mimo, wider values": Form("mimo_v2_flash", {"head_dim": 32, "v_head_dim": 48}, native=False),
    "nemotron_h, never tied": Form("nemotron_h", {"tie_word_embeddings": True}),
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a form, made once."""

    def made(name: str) -> Path:
        form = FORMS[name]
        folder = models.make(form.family, tmp_path_factory.mktemp("form"), **form.changes)
        file = folder / "config.json"
        config = json.loads(file.read_text()) | form.written
        left_out = {key for key, value in form.written.items() if value is None}
        file.write_text(json.dumps({key: value for key, value in config.items() if key not in left_out}))
        if form.doubled:
            weights = load_file(folder / "model.safetensors")
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return functools.cache(made)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_one_rank(name: str, folder_of: Callable[[str], Path]) -> None:
    """Greedy float64 tokens are generate's, and float32 logits are within 1e-4 of transformers' forward."""
    folder, jobs = folder_of(name), mixed()
    assert_identical(folder, jobs, play(engine_of(folder, "float64"), write(jobs)))
    engine = engine_of(folder, "float32")
    assert load_library() is None or engine.model.is_native == FORMS[name].native
    assert_close(folder, jobs, play(engine, write(jobs)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_two_ranks(name: str, folder_of: Callable[[str], Path], ranks: RankGroup) -> None:
    """The same of two ranks."""
    folder, jobs = folder_of(name), mixed()
    ranks.form(2)
    ranks.ask("load", folder, "float64")
    assert_identical(folder, jobs, ranks.ask("play", write(jobs))[0])
    ranks.ask("load", folder, "float32")
    assert_close(folder, jobs, ranks.ask("play", write(jobs))[0])
