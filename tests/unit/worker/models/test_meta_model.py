"""Models are built without weights in threads: several of one process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.models import FAMILY_SHAPES, SHAPE
from worker.families.registry import FAMILIES
from worker.models.torch import meta_model


@pytest.mark.parametrize("family", sorted(name for name, one in FAMILIES.items() if "head_dim" in one.fields))
def test_a_null_width_of_heads_follows_from_the_hidden_size(family: str) -> None:
    """Also where transformers' class computes with the null."""
    shape = {"model_type": family, **SHAPE, **FAMILY_SHAPES[family], "head_dim": None}
    config = meta_model.configuration(shape)
    assert getattr(config, "per_layer_config", [config])[0].head_dim == 64 // 4


def test_threads_that_build_at_the_same_time_keep_their_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model has buffers of its own type, and torch's default type is afterwards what it was."""
    compute = meta_model._compute_buffers

    def compute_slowly(model: torch.nn.Module, device: torch.device) -> None:
        time.sleep(0.05 if torch.get_default_dtype() == torch.float64 else 0.15)
        compute(model, device)

    monkeypatch.setattr(meta_model, "_compute_buffers", compute_slowly)
    config = meta_model.configuration({"model_type": "llama", **SHAPE, "num_hidden_layers": 1})
    before, types = torch.get_default_dtype(), [torch.float64, torch.float32, torch.float64, torch.bfloat16]
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda dtype: meta_model.meta_model(config, dtype, torch.device("cpu")), types))
    assert [next(model.parameters()).dtype for model in models] == types
    assert torch.get_default_dtype() == before
