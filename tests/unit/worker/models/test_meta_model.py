"""Models are built without weights in threads: several of one process."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from control.errors import ModelFilesError, SettingsError
from tests.models import FAMILY_SHAPES, SHAPE
from worker.families.registry import FAMILIES
from worker.models.torch import meta_model


@pytest.mark.parametrize("family", sorted(name for name, one in FAMILIES.items() if "head_dim" in one.fields))
def test_a_null_width_of_heads_follows_from_the_hidden_size(family: str) -> None:
    """Also where transformers' class computes with the null."""
    shape = {"model_type": family, **SHAPE, **FAMILY_SHAPES[family], "head_dim": None}
    config = meta_model.configuration(shape)
    assert getattr(config, "per_layer_config", [config])[0].head_dim == 64 // 4


def test_fields_with_which_modules_fail_are_refused() -> None:
    """transformers' configuration takes a theta of null, and the modules compute with it."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": None}
    config = meta_model.configuration({"model_type": "llama", **SHAPE, "rope_parameters": rope})
    with pytest.raises(ModelFilesError, match=r"can't make a model of config.json: TypeError: .* Correct or remove"):
        meta_model.meta_model(config, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("of CUDA"), MemoryError(), ImportError("no module"), SettingsError("no compiler")]
)
@pytest.mark.parametrize("place", ["modules", "buffers"])
def test_what_no_field_causes_is_not_put_down_to_the_file(
    error: Exception, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while modules are made nor while their buffers are computed on the device."""

    def fail(*_: object, **__: object) -> None:
        raise error

    if place == "modules":
        monkeypatch.setattr(meta_model.AutoModelForCausalLM, "from_config", fail)
    else:
        monkeypatch.setattr(meta_model, "_compute_buffers", fail)
    config = meta_model.configuration({"model_type": "llama", **SHAPE})
    with pytest.raises(type(error)) as caught:
        meta_model.meta_model(config, torch.float32, torch.device("cpu"))
    assert caught.value is error


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
