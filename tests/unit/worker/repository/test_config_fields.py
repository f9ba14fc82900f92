"""Odd configurations are accepted or refused by field: hostile ones too, with the value."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from control.errors import ModelFilesError, UnsupportedArchitecture
from tests.models import FAMILY_SHAPES, SHAPE
from worker.families.gemma4 import heads_by_layer
from worker.families.registry import FAMILIES, REFUSED, TEXT_PARTS
from worker.models.native.config import native_config
from worker.models.native.module import NotNative
from worker.models.native.modules import native_meta_model
from worker.repository import validation
from worker.repository.multimodal import text_config

HOSTILE: tuple[Any, ...] = (
    *(None, 0, -1, 1, 3, 10**9, 10**30, 2.5, float("nan"), float("inf"), True, "", "x", [], [None], [[]], {}),
    *({"rope_type": []}, {"rope_type": "x"}, {"full_attention": {"factor": -1}}, ["full_attention"]),
)


def config_of(family: str) -> dict[str, Any]:
    return {"model_type": family, **SHAPE, **FAMILY_SHAPES[family]}


def rope_of(family: str, **changes: Any) -> dict[str, Any]:
    """A change of the rotary parameters of `config_of`."""
    return {"rope_parameters": config_of(family)["rope_parameters"] | changes}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_any_value_in_any_field_is_judged(family: str) -> None:
    """A value of any type in any field, and in several at once, is served or refused, and never another error."""
    whole, chance = config_of(family), random.Random(0)
    validation.check(whole, 2)
    more = ("layer_types", "sliding_window", "rope_scaling", "quantization_config", "text_config", "per_layer_config")
    names = sorted({*whole, *more})
    refused = 0
    changes = [{name: value} for name in names for value in HOSTILE]
    changes += [{name: chance.choice(HOSTILE) for name in chance.sample(names, 3)} for _ in range(100)]
    for change in changes:
        try:
            validation.check(whole | change, 2, max_context=16)
            validation.eos_ids(whole | change, change)
        except (ModelFilesError, UnsupportedArchitecture) as error:
            assert len(str(error)) < 1200
            refused += 1
    assert refused > len(changes) / 4


@pytest.mark.parametrize("kind", sorted(TEXT_PARTS))
def test_any_text_part_is_judged(kind: str) -> None:
    """The same of the fields within text_config and beside it."""
    text = {"model_type": "mistral", **SHAPE}
    for name in [*text, "rope_scaling", "rope_parameters"]:
        for value in HOSTILE:
            for config in (
                {"text_config": text | {name: value}},
                {"text_config": text, name: value},
                {"text_config": value},
            ):
                try:
                    validation.check(text_config({"model_type": kind, **config}), 1)
                except (ModelFilesError, UnsupportedArchitecture):
                    continue


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; .*at most 4096"),
        ("llama", {"num_attention_heads": 10**30}, "num_attention_heads = 1"),
        ("llama", {"vocab_size": -1}, "vocab_size = -1"),
        ("llama", {"num_key_value_heads": "2"}, "num_key_value_heads = '2'"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps = 'small'; a number above 0"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes'; true or false"),
        ("llama", {"rope_scaling": 8.0}, r"rope_scaling = 8\.0; an object"),
        ("llama", {"rope_scaling": {"rope_type": "spiral"}}, "Rotary embedding 'spiral' is not known"),
        ("apertus", {"head_dim": 2**31 - 64}, "head_dim = 2147483584; .*at most 65536"),
        ("minimax_m2", {"rotary_dim": 2**31 - 1}, "rotary_dim = 2147483647; .*at most 65536"),
        ("mimo_v2_flash", {"v_head_dim": 2**31 - 64}, "v_head_dim = 2147483584; .*at most 65536"),
        (
            "llama",
            {"head_dim": None, "hidden_size": 2**31 - 64},
            "hidden_size = 2147483584; a size by which a head has",
        ),
        ("deepseek_v3", rope_of("deepseek_v3", factor=None), "rope_parameters.factor = None; a number, as mscale_all"),
        ("deepseek_v3", rope_of("deepseek_v3", mscale="1"), "rope_parameters.mscale = '1'; a number from 0 on"),
        ("gpt_oss", rope_of("gpt_oss", attention_factor=[]), r"attention_factor = \[\]; a number from 0 on"),
        ("gpt_oss", rope_of("gpt_oss", beta_slow=-1), "rope_parameters.beta_slow = -1; a number above 0"),
        ("gpt_oss", rope_of("gpt_oss", beta_fast=float("nan")), "rope_parameters.beta_fast = nan; a number above 0"),
        ("gpt_oss", rope_of("gpt_oss", beta_fast=5e-324), "rope_parameters.beta_fast = 5e-324; at least 1e-18"),
        ("phi3", {"rope_scaling": {"type": "su"}}, "Rotary embedding 'longrope' depends"),
        ("phi", {"rope_parameters": {"partial_rotary_factor": 1.5}}, r"partial_rotary_factor = 1\.5"),
        ("gpt_oss", {"layer_types": ["full_attention"]}, "layer_types = .* num_hidden_layers = 3 kinds"),
        ("gpt_oss", {"layer_types": ["full_attention", "linear_attention", "x"]}, "a layer of type 'linear_attention'"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window = None; a width, as layer_types has sliding"),
        ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok = 5; at most num_local_experts = 4"),
        ("glm4_moe", {"n_group": 3}, "n_group = 3; a divisor of n_routed_experts = 8"),
        ("glm4_moe", {"topk_group": 3}, "topk_group = 3; at most n_group = 2"),
        ("glm4_moe", {"n_group": 8}, "n_group = 8; a number that leaves 2 of n_routed_experts = 8 to a group"),
        ("glm4_moe", {"n_routed_experts": 1, "num_experts_per_tok": 1, "n_group": 1}, "n_group = 1; a number that"),
        ("deepseek_v3", {"n_routed_experts": 9, "n_group": 3, "topk_group": 4}, "topk_group = 4; at most n_group = 3"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "partial_rotary_factor": 0.5}}, "turns whole heads"),
        (
            "granite",
            {"partial_rotary_factor": 0.5, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            r"partial_rotary_factor = 0\.5 with the rotary embedding 'yarn' in rope_parameters; model type 'granite'",
        ),
        ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok = 3; a sparse mixer chooses 2"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, r"moe_norm_min = 0\.5: sums of weights"),
        ("ernie4_5_moe", {"moe_norm_min": -1}, "moe_norm_min = -1; a number from 0 on"),
        ("ernie4_5_moe", {"moe_norm_min": float("nan")}, "moe_norm_min = nan; a number from 0 on"),
        ("qwen3_moe", {"mlp_only_layers": [0.5]}, r"mlp_only_layers = \[0\.5\]; a list of whole numbers"),
        ("dots1", {"n_routed_experts": None}, "n_routed_experts = None; a positive whole number"),
        ("dots1", {"num_experts_per_tok": None}, "num_experts_per_tok = null; remove the field"),
        ("dots1", {"num_local_experts": 1}, "num_experts_per_tok = 2; at most n_routed_experts = 1"),
        ("mixtral", {"num_experts": "8"}, "num_local_experts = '8'; a positive whole number"),
        ("qwen2_moe", {"num_experts": 0}, "num_experts = 0"),
        ("olmoe", {"head_dim": 32}, "head_dim = 32; hidden_size / num_attention_heads = 16, or no such field,"),
        ("olmoe", {"hidden_size": 66, "head_dim": None}, "hidden_size = 66; a multiple of num_attention_heads = 4"),
        ("phi", {"head_dim": 8}, "head_dim = 8; hidden_size / num_attention_heads = 16, or no such field,"),
    ],
)
def test_a_fault_names_field_and_value(family: str, changes: dict[str, Any], message: str) -> None:
    """Each refusal can be understood without a look into the file."""
    with pytest.raises((ModelFilesError, UnsupportedArchitecture), match=message):
        validation.check(config_of(family) | changes, 1)
    validation.check(config_of(family), 1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"mlp_only_layers": [-1]}),
        ("ernie4_5_moe", {"moe_norm_min": 0}),
        ("phi", {"head_dim": 32, "qk_layernorm": False}),
    ],
)
def test_values_without_an_effect_are_served(family: str, changes: dict[str, Any]) -> None:
    """The number of no layer, a sum's bound that is none, and the width of norms that are absent."""
    config = config_of(family) | changes
    validation.check(config, 1)
    native_config(config)


@pytest.mark.parametrize("name", ["interleave_moe_layer_step", "no_rope_layer_interval"])
def test_a_period_of_more_layers_than_there_are(name: str) -> None:
    """Llama 4's layers that follow from a number: none of them is the last one of a period."""
    lists = {"no_rope_layers": None, "moe_layers": None, name: 2**31 - 1}
    config = text_config(config_of("llama4_text") | lists)
    validation.check(config, 1)
    native_config(config)
    assert config["moe_layers" if name.startswith("interleave") else "no_rope_layers"] in ([], [1, 1, 1, 1])


@pytest.mark.parametrize("name", ["interleave_moe_layer_step", "no_rope_layer_interval"])
@pytest.mark.parametrize("value", [None, 0, 2.5, "2", True])
def test_a_period_that_is_no_number_is_refused_by_name(name: str, value: object) -> None:
    """Before the lists that would follow from it are read."""
    lists = {"no_rope_layers": None, "moe_layers": None, name: value}
    with pytest.raises(ModelFilesError, match=f"config.json has {name} = "):
        validation.check(text_config(config_of("llama4_text") | lists), 1)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "llama", "mistral4"])
def test_any_rotary_parameter_is_judged(family: str) -> None:
    """A value of any type of any rotary parameter is refused, or the embedding has finite frequencies."""
    refused = 0
    names = {*config_of(family)["rope_parameters"], "attention_factor", "mscale", "mscale_all_dim", "truncate"}
    values = (*HOSTILE, 5e-324, 1e308, -(2**31))
    for name, value in itertools.product(sorted(names), values):
        config = config_of(family) | rope_of(family, **{name: value})
        try:
            validation.check(config, 1)
            model = native_meta_model(native_config(config), config)
        except NotNative:  # a type or an object of rope_parameters that transformers reads
            continue
        except (ModelFilesError, UnsupportedArchitecture):
            refused += 1
            continue
        assert all(np.isfinite(rotary.inv_freq).all() for rotary in model.model.rotaries.values())
    assert refused > len(names) * len(values) / 2


def test_a_rotary_embedding_without_layers_is_not_judged() -> None:
    """A part of heads that only a kind of layers without one would turn."""
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}
    rope = {"full_attention": {"rope_type": "default", "rope_theta": 1e4}, "sliding_attention": scaled}
    config = config_of("lfm3") | {"rope_parameters": rope}
    with pytest.raises(UnsupportedArchitecture, match="turns whole heads"):
        validation.check(config, 1)
    validation.check(config | {"layer_types": ["conv", "full_attention", "full_attention", "conv"]}, 1)


def test_groups_of_experts_that_a_file_omits_are_those_of_the_class() -> None:
    """deepseek_v3 has 8 groups where config.json says nothing."""
    config = {name: value for name, value in config_of("deepseek_v3").items() if name != "n_group"}
    with pytest.raises(ModelFilesError, match="n_group = 8; a number that leaves 2 of n_routed_experts = 8"):
        validation.check(config, 1)
    validation.check(config | {"n_routed_experts": 16}, 1)


@pytest.mark.parametrize("value", ["x", [1, "x"], -1, True, {}])
def test_ends_of_a_sequence_are_token_ids(value: object) -> None:
    """An id that is none is refused before the API would compare it with tokens."""
    with pytest.raises(ModelFilesError, match="eos_token_id = "):
        validation.eos_ids({}, {"eos_token_id": value})


@pytest.mark.parametrize("saved", [False, True], ids=["as Google writes it", "as transformers saves it"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_k_eq_v": False},
        {"num_global_key_value_heads": None},
        {"num_hidden_layers": 13, "layer_types": None, "num_kv_shared_layers": 0},
        {"layer_types": ["full_attention", *["sliding_attention"] * 4], "num_kv_shared_layers": 0},
    ],
    ids=str,
)
def test_heads_by_layer_are_those_of_transformers(changes: dict[str, Any], saved: bool) -> None:
    """The key-value heads and their width of each layer of gemma4, of a file of either form."""
    from worker.models.torch.meta_model import configuration

    config = config_of("gemma4_text") | changes
    theirs: Any = configuration(config)
    if saved:
        config = theirs.to_dict()
    validation.check(config, 1)
    layers = range(config["num_hidden_layers"])
    assert validation.layer_kv_heads(config) == [theirs.per_layer_config[layer].num_key_value_heads for layer in layers]
    widths = [layer.get("head_dim", 16) for layer in heads_by_layer(config)]
    assert widths == [theirs.per_layer_config[layer].head_dim for layer in layers]
    assert len(set(widths)) == 2


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({"num_kv_shared_layers": 3}, 1, "num_kv_shared_layers = 3; a number that leaves a layer of each kind"),
        ({"num_kv_shared_layers": 5}, 1, "num_kv_shared_layers = 5"),
        ({"num_attention_heads": 12, "num_global_key_value_heads": 3}, 2, "3 key-value heads can be neither divided"),
        ({"num_global_key_value_heads": 3}, 1, "4 attention heads can't share 3 key-value heads"),
        ({"top_k_experts": 5}, 1, "top_k_experts = 5; at most num_experts = 4"),
        ({"num_experts": None}, 1, "num_experts = None; a positive whole number"),
        ({"per_layer_config": {"7": {"head_dim": 32}}}, 1, "per_layer_config = '7'; a layer below num_hidden_layers"),
        (
            {"per_layer_config": {"1": {"hidden_size": 32}}},
            1,
            "per_layer_config.1 = .*head_dim and num_key_value_heads",
        ),
        ({"per_layer_config": {"1": {"head_dim": 0}}}, 1, "head_dim = 0"),
        ({"vocab_size_per_layer_input": 130}, 1, "vocab_size_per_layer_input = 130; at least vocab_size = 131"),
        ({"use_bidirectional_attention": "all"}, 1, "an encoder can't generate"),
        ({"model_type": "llama", "per_layer_config": {"1": {}}}, 1, "per_layer_config = .*'llama' is not served with"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "proportional"}}, 1, "'proportional' is not known"),
    ],
)
def test_what_gemma4_can_not_be(changes: dict[str, Any], tp: int, message: str) -> None:
    """Layers without keys and values, heads that can't be shared, and fields by layer that no other type has."""
    whole = config_of("gemma4_text")
    validation.check(whole | {"use_bidirectional_attention": "vision"}, tp)
    with pytest.raises((ModelFilesError, UnsupportedArchitecture), match=message):
        validation.check(whole | changes, tp)


def test_every_default_is_transformers_own() -> None:
    """The table's key-value heads are those of transformers' configuration classes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for kind, family in FAMILIES.items():
        config = CONFIG_MAPPING[kind]()
        assert config.num_key_value_heads == (family.kv_heads or config.num_attention_heads), kind
        more = CONFIG_MAPPING[kind](hidden_size=7680, num_attention_heads=120)
        assert more.num_key_value_heads == (family.kv_heads or 120), kind


def test_every_refused_type_is_transformers_own() -> None:
    """A name that is misspelt would refuse nothing."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert set(REFUSED) <= set(CONFIG_MAPPING.keys())
    assert not set(REFUSED) & set(FAMILIES)
