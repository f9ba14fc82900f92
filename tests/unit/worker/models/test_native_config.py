"""Configurations, rotary embeddings and shares of models in C++ against those of transformers' classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from control.errors import ModelFilesError
from tests.models import SHAPE
from worker.layers.sharding import ShardPlan
from worker.models.loading import _cache_layout
from worker.models.meta_model import configuration, meta_model
from worker.models.native.config import native_config
from worker.models.native.families import FAMILIES
from worker.models.native.modules import native_meta_model
from worker.models.native.rotary import rotary
from worker.models.native.unsupported import NotNative

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    {"sliding_window": 12},
    {"sliding_window": None},
    {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 12, "use_sliding_window": True, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
    {"attention_bias": True, "mlp_bias": True},
    {"qkv_bias": True, "bias": True, "attention_out_bias": True},
    {"head_dim": 32},
    {"rope_theta": 5e5},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    {"rope_scaling": {"type": "linear", "factor": 3}, "rope_theta": 2e4},
    {"rope_scaling": LLAMA3},
    {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64}, "rope_theta": 5e5},
    {"rope_scaling": YARN, "rope_theta": 1e6},
    {"rope_parameters": YARN | {"rope_theta": 1e6, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
    {"rope_parameters": YARN | {"rope_theta": 1e4, "mscale": 0.7, "mscale_all_dim": 1.0}},
    {"rope_parameters": YARN | {"rope_theta": 1e4, "attention_factor": 1.25}},
    {"original_max_position_embeddings": 32, "rope_scaling": YARN},
]


WITHOUT_WINDOWS = {"internlm3", "llama", "seed_oss"}


def config_json(family: str, **changes: Any) -> dict[str, Any]:
    shape = {name: value for name, value in SHAPE.items() if name != "tie_word_embeddings"}
    return {"model_type": family} | shape | changes


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_omitted_fields_are_those_of_transformers(family: str) -> None:
    """A field that config.json omits has the value of transformers' class."""
    theirs = CONFIG_MAPPING[family]()
    for name, value in FAMILIES[family].fields.items():
        if name == "head_dim" and value is None:
            assert getattr(theirs, name, None) in (None, theirs.hidden_size // theirs.num_attention_heads)
        elif name in ("sliding_window", "layer_types"):  # transformers computes these when it makes the object
            assert type(theirs).__dataclass_fields__[name].default == value
        else:
            assert getattr(theirs, name) == value


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_models_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    """Parameters, shapes, windows, rotary frequencies and the scale of attention are equal, to the bit."""
    given = config_json(family, **changes)
    config = configuration(given)
    theirs: Any = meta_model(config, torch.float32, torch.device("cpu"))
    ours: Any = native_meta_model(native_config(given), given)
    assert shapes(ours) == shapes(theirs)
    assert torch.equal(ours.model.rotary_emb.inv_freq, theirs.model.rotary_emb.inv_freq)
    assert ours.model.rotary_emb.attention_scaling == theirs.model.rotary_emb.attention_scaling
    assert ours.model.layers[0].self_attn.scaling == theirs.model.layers[0].self_attn.scaling
    assert ours.model.norm.eps == theirs.model.norm.variance_epsilon
    assert ours.config.tie_word_embeddings == config.tie_word_embeddings
    plan = ShardPlan({}, config.num_attention_heads, config.num_key_value_heads, 0, 1)
    layouts = [_cache_layout(one, plan, torch.float32, torch.device("cpu")) for one in (ours.config, config)]
    if family not in WITHOUT_WINDOWS and (
        family != "mistral" or "layer_types" not in changes
    ):  # fields that it does not read
        assert layouts[0] == layouts[1]
    assert [layer.window for layer in layouts[0].layers] == windows_of(theirs)


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(one.shape) for name, one in model.named_parameters(remove_duplicate=False)}


def windows_of(model: Any) -> list[int | None]:
    """The windows that transformers' attention modules, or the masks of a whole model, have."""
    kinds, window = getattr(model.config, "layer_types", None), getattr(model.config, "sliding_window", None)
    if model.config.model_type in WITHOUT_WINDOWS:
        return [None] * len(model.model.layers)
    if model.config.model_type == "mistral":
        return [window] * len(model.model.layers)
    assert kinds is not None
    return [layer.self_attn.sliding_window for layer in model.model.layers]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"head_dim": 24}, "its heads are 24 wide"),
        ({"partial_rotary_factor": 0.5}, r"only 0\.5 of its heads"),
        ({"rope_scaling": {"rope_type": "axial"}}, "of type axial"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"differ by layer \(full_attention\)"),
    ],
)
def test_other_forms_are_left_to_transformers(changes: dict[str, Any], message: str) -> None:
    given = config_json("llama", **changes)
    with pytest.raises(NotNative, match=message):
        native_meta_model(native_config(given), given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"intermediate_size": "90"}, "intermediate_size = '90'"),
        ({"intermediate_size": None}, "intermediate_size = None"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps = True"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "a list of 3 is needed"),
    ],
)
def test_values_of_a_wrong_type(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        native_config(config_json("qwen3", **changes))


def test_a_rotary_parameter_that_is_missing() -> None:
    with pytest.raises(ModelFilesError, match="factor = None among the rotary parameters"):
        rotary({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear"}}, 16)
