"""Fused kernels change no model's output: whole models with and without."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which has no wheel here")


from tests.integration.worker.engine.ranks import play
from tests.integration.worker.engine.script import Job, write
from worker.collective import Solo
from worker.engine.step import Engine
from worker.families.registry import FAMILIES
from worker.kv.slabs import SlabStore
from worker.models.loading import load
from worker.models.torch import loading as torch_loading
from worker.models.torch.kernels import modules as kernels
from worker.native.host import SWITCH

JOBS = [Job(1, list(range(11)), 8, 2), Job(2, list(range(40, 45)), 16, 2, start=1)]

REPLACED = {
    "cohere2": 3,
    "ernie4_5": 3 * 3 + 1,
    "gemma": 3 * 3 + 1,
    "gemma2": 3 * 5 + 1,
    "gemma3n_text": 5 * 8 + 3 + 1 + 1 + 2,
    "gemma4_text": 5 * (5 + 5) + 3 + 1 + 1,
    "glm4_moe": 3 * 5 + 1,
    "gpt_oss": 3 * 2 + 1,
    "granite": 3 * 3 + 1,
    "llama": 3 * 3 + 1,
    "mimo_v2_flash": 3 * 2 + 1 + 1,
    "qwen3": 3 * 5 + 1,
    "starcoder2": 0,
}
"""Of three layers: norms and feed-forward. cohere2 and starcoder2 have layer norms, starcoder2 no gate, gpt_oss experts
alone; two of glm4_moe's feed-forwards are shared experts, and three of gemma3n's clear most of their gates."""


@pytest.mark.parametrize("family", sorted(REPLACED))
def test_fused_models_have_the_same_logits(
    family: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Float32 logits are the same within 1e-4, and what should be replaced is."""
    folder = checkpoint(family)
    monkeypatch.setattr(torch_loading, "fuse_norms", lambda model: None)  # on a GPU the norms are transformers' own
    monkeypatch.setenv(SWITCH, "0")  # nor is its forward C++
    model = load(folder, collective=Solo(), dtype="float32")
    modelling = sys.modules[type(model._module).__module__]
    plain = getattr(modelling, kernels.ROTARY)
    monkeypatch.setattr(modelling, kernels.ROTARY, plain)  # so that it is put back
    before = play(Engine(model, SlabStore(model.cache_layout, 64), Solo()), write(JOBS))
    assert kernels.fuse(model._module) == REPLACED[family]
    record = FAMILIES[family]
    assert (getattr(modelling, kernels.ROTARY) is plain) == (record.rope_neighbours or record.rotates_apart)
    after = play(Engine(model, SlabStore(model.cache_layout, 64), Solo()), write(JOBS))
    for job in JOBS:
        theirs, ours = (torch.stack(run.logits[job.sid]) for run in (before, after))
        assert (theirs - ours).abs().max() < 1e-4


def test_a_float64_model_is_left_alone(checkpoint: Callable[[str], Path]) -> None:
    """The kernels compute in float32, which would make exact runs inexact."""
    model = load(checkpoint("llama"), collective=Solo(), dtype="float64")
    assert kernels.fuse(model._module) == 0
