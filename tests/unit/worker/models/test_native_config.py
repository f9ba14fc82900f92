"""C++ models have transformers' configuration: rotary embeddings and shares too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from control.errors import ModelFilesError
from tests.models import FAMILY_SHAPES, SHAPE
from worker.families.recurrence import attends
from worker.families.registry import FAMILIES
from worker.models.native.config import native_config
from worker.models.native.module import NotNative
from worker.models.native.modules import CausalModel, native_meta_model
from worker.models.native.rotary import rotaries
from worker.models.shard import cache_layout, cache_sources
from worker.models.torch.meta_model import configuration, meta_model
from worker.repository import validation
from worker.weights.sharding import ShardPlan

NATIVE = sorted(name for name, family in FAMILIES.items() if family.is_native)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FIELDS: list[dict[str, Any]] = [
    {"tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    {"sliding_window": 12},
    {"sliding_window": None},
    {"sliding_window": 12, "use_sliding_window": True, "max_window_layers": 1},
    {"sliding_window": 12, "use_sliding_window": True, "layer_types": ["full_attention"] * 2 + ["sliding_attention"]},
    {"sliding_window": 12, "sliding_window_pattern": 2},
    {"attention_bias": True, "mlp_bias": True},
    {"qkv_bias": True, "bias": True, "attention_out_bias": True},
    {"qkv_bias": False, "use_bias": True, "attention_bias": False},
    {"query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0, "attn_logit_softcapping": None},
    {"num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [0], "norm_topk_prob": True},
    {"num_local_experts": 4, "num_experts_per_tok": 3, "swiglu_limit": 5.0},
    {"no_rope_layers": [0, 1, 0]},
    {"no_rope_layer_interval": 2},
    {"hidden_act": "gelu"},
    {"layer_types": ["full_attention"] * 2 + ["linear_attention"], "linear_num_value_heads": 16},
]
ROPES: list[dict[str, Any]] = [
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
ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
"""Of Hunyuan's files."""
FEED_FORWARDS: list[dict[str, Any]] = [
    {"full_attn_idxs": [1], "conv_bias": True, "norm_eps": 1e-3, "tie_embedding": False, "rms_norm_eps": 0.5},
    {"layer_types": ["conv", "full_attention", "conv"], "block_ff_dim": 300, "block_multiple_of": 7},
    {"block_auto_adjust_ff_dim": False, "conv_L_cache": 5, "rope_theta": 1e4, "full_attn_idxs": [0, 2]},
]
"""Of lfm2."""
HYBRIDS: list[dict[str, Any]] = [
    {"mamba_n_groups": 2, "mamba_proj_bias": True, "mamba_conv_bias": False, "position_embedding_type": "rope"},
    {"num_local_experts": 0, "num_experts_per_tok": 0, "head_dim": 32, "shared_intermediate_size": 50},
    {"layer_types": ["attention"] * 3, "position_embedding_type": "rope", "rope_theta": 2e5},
]
"""Of granitemoehybrid."""
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"head_dim": 64},
    "mistral4": {"head_dim": 128},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8},
    "granitemoeshared": {"shared_intermediate_size": 45},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"]},
    "mimo_v2_flash": {"head_dim": 32, "v_head_dim": 16},
}
"""Fields without which a type's models are refused, or are torch's."""
PARTIAL: list[dict[str, Any]] = [
    {"partial_rotary_factor": 0.75},
    {"partial_rotary_factor": 0.25, "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 3e4}},
    {"rope_scaling": YARN},
]
ROTARY_DIMS: list[dict[str, Any]] = [
    {"rotary_dim": 12},
    {"rotary_dim": 4, "partial_rotary_factor": 0.5},
    {"rotary_dim": 4, "rope_parameters": {"rope_theta": 1e5, "rope_type": "default", "partial_rotary_factor": 0.75}},
]
OWN_INPUTS: list[dict[str, Any]] = [
    {"hidden_size_per_layer_input": 0},
    {"num_hidden_layers": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True, "global_head_dim": 64},
    {"per_layer_config": {"2": {"head_dim": 48, "num_key_value_heads": 1}}, "attention_k_eq_v": True},
    {
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 1e5,
                "partial_rotary_factor": 0.4,
                "factor": 2.0,
            },
            "sliding_attention": {"rope_type": "linear", "rope_theta": 3e4, "factor": 4.0},
        },
        "use_bidirectional_attention": "vision",
    },
]
"""Of gemma4_text."""
PUBLISHED_MIMO: list[dict[str, Any]] = [
    {"num_hidden_layers": 12, "sliding_window": 128, "sliding_window_size": 128, "routed_scaling_factor": None},
    {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e6},
            "sliding_attention": YARN | {"rope_theta": 1e4},
        }
    },
    {"attention_value_scale": None},
]
BY_KIND: list[dict[str, Any]] = [
    {"rope_theta": 7e5, "rope_local_base_freq": 3e4},
    {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    {"rope_parameters": {"full_attention": YARN | {"rope_theta": 1e5}, "sliding_attention": {"rope_type": "default"}}},
    {
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 100.0, "original_max_position_embeddings": 256, "truncate": False},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    {"rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
    {"layer_types": ["full_attention"] * 3, "rope_theta": 2e5},
]


def variants() -> list[Any]:
    """Each family as its defaults are and as the tests' models are, and with each change to a field that it reads."""
    found: list[tuple[str, dict[str, Any]]] = [("llama", changes) for changes in ROPES]
    found += [("qwen3_next", changes) for changes in PARTIAL] + [("mixtral", ROPES[2]), ("phi3", PARTIAL[1])]
    found += [(family, changes) for family in ("gemma3_text", "olmo3") for changes in BY_KIND]
    found += [("lfm2", changes) for changes in FEED_FORWARDS]
    found += [("granitemoehybrid", changes) for changes in HYBRIDS]
    found += [("minimax_m2", changes) for changes in ROTARY_DIMS]
    found += [(family, ROPES[0]) for family in ("apertus", "gpt_oss", "ministral3")]
    found += [("gemma4_text", changes) for changes in OWN_INPUTS]
    found += [("gemma3n_text", {"num_hidden_layers": layers}) for layers in (10, 11)]
    found += [("mimo_v2_flash", changes) for changes in PUBLISHED_MIMO]
    found += [(family, {"rope_scaling": ALPHA}) for family in ("hunyuan_v1_dense", "hunyuan_v1_moe")]
    found += [(family, {"head_dim": 32}) for family in ("gemma2", "olmo2", "qwen3_moe")]
    for family in NATIVE:
        row = FAMILIES[family]
        known = {*row.fields, *row.aliases.values()}
        found += [(family, {}), (family, FAMILY_SHAPES[family])]
        found += [(family, fields) for fields in FIELDS if row_reads(known, fields) and serves(family, fields)]
    return [pytest.param(family, changes, id=f"{family}-{changes}") for family, changes in found]


def row_reads(known: set[str], changes: dict[str, Any]) -> bool:
    """True if the first of the fields, for whose sake the others are there, is read."""
    return next(iter(changes)) in known


def serves(family: str, changes: dict[str, Any]) -> bool:
    """False for what a family's class, or the gate, refuses."""
    if family == "deepseek_v3" and "num_local_experts" in changes:  # fewer experts than groups
        return False
    if family == "lfm3" and ("attention_bias" in changes or changes.get("sliding_window", 0) is None):
        return False
    if "hidden_act" in changes:
        return family == "gemma"
    if family in ("lfm2", "lfm2_moe", "lfm3") and "layer_types" in changes:
        return False
    recurrent = family in {"granitemoehybrid", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
    if "layer_types" in changes and ("linear_attention" in changes["layer_types"]) != recurrent:
        return False
    if family in ("gemma3n_text", "gemma4_text", "mimo_v2_flash") and changes.get("sliding_window", 0) is None:
        return False
    # transformers divides by the period, which is 0 without windows.
    return family not in ("exaone4", "exaone_moe") or changes.get("sliding_window", 0) is not None


COMPUTED = {
    "activation_sparsity_pattern",
    "intermediate_size",
    "mlp_layer_types",
    "moe_layer_end_index",
    "mlp_multipliers",
    "layers_block_type",
    "moe_layers",
}
FALCON = {"model_type": "falcon_h1", **NEEDED["falcon_h1"]}
HYBRID = {"model_type": "granitemoehybrid", **NEEDED["granitemoehybrid"]}
WITHOUT_LAYER_TYPES = {"ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2"}
"""Types with one mask for all layers."""


def config_json(family: str, **changes: Any) -> dict[str, Any]:
    shape = {name: value for name, value in SHAPE.items() if name != "tie_word_embeddings"}
    own = {"model_type": family, "full_attention_interval": 3} | shape | numbers_of_experts(family)
    return FAMILIES[family].completed(own | NEEDED.get(family, {}) | changes)


def numbers_of_experts(family: str) -> dict[str, Any]:
    """Those that config.json has to say: transformers' class has none, and makes no model without them."""
    defaults = FAMILIES[family].defaults
    return {
        name: value
        for name, value in FAMILY_SHAPES.get(family, {}).items()
        if "experts" in name and defaults.get(name, 0) is None
    }


@pytest.mark.parametrize("family", NATIVE)
def test_omitted_fields_are_those_of_transformers(family: str) -> None:
    """A field that config.json omits has the value of transformers' class."""
    theirs = CONFIG_MAPPING[family]()
    theirs.allow_global_per_layer_attribute_access = True  # gemma4's heads differ by layer
    for name in set(FAMILIES[family].fields) - set(FAMILIES[family].own_defaults):
        value = FAMILIES[family].defaults[name]
        if name == "head_dim" and value is None:
            assert getattr(theirs, name, None) in (None, theirs.hidden_size // theirs.num_attention_heads)
        elif name == "sliding_window_pattern":
            assert getattr(theirs, name, getattr(theirs, f"_{name}", None)) == value
        elif name in ("sliding_window", "layer_types", "mlp_only_layers", "no_rope_layers", *COMPUTED):
            # transformers computes these when it makes the object
            assert type(theirs).__dataclass_fields__[name].default == value
        else:
            assert getattr(theirs, name) == value


@pytest.mark.parametrize(("family", "changes"), variants())
def test_models_are_those_of_transformers(family: str, changes: dict[str, Any]) -> None:
    """Parameters, shapes, windows, rotary frequencies and the scales of attention and embeddings are equal, to the
    bit."""
    given = config_json(family, **changes)
    config = configuration(given)
    theirs: Any = meta_model(config, torch.float32, torch.device("cpu"))
    ours: Any = native_meta_model(native_config(given), given)
    assert shapes(ours) == shapes(theirs)
    mixers = [getattr(layer, "self_attn", getattr(layer, "mixer", None)) for layer in theirs.model.layers]
    attentions = [one for one in mixers if hasattr(one, "scaling")]
    assert [rotary_of(ours, theirs, kind) for kind in set(ours.config.layer_types) - {"linear_attention"}]
    keys = getattr(config, "key_multiplier", 1.0) * getattr(config, "attention_in_multiplier", 1.0) ** 2
    assert ours.config.scaling == pytest.approx(attentions[0].scaling * keys, rel=0 if keys == 1 else 1e-12)
    assert len({attention.scaling for attention in attentions}) == 1
    assert ours.config.sparsity == getattr(config, "activation_sparsity_pattern", [0.0] * config.num_hidden_layers)
    assert ours.config.attention_cap == (getattr(attentions[0], "attn_logit_softcapping", None) or 0.0)
    assert ours.config.logit_cap == (getattr(config, "final_logit_softcapping", None) or 0.0)
    norm = next(
        getattr(theirs.model, name)
        for name in ("norm", "embedding_norm", "final_layernorm", "norm_f")
        if hasattr(theirs.model, name)
    )
    assert ours.model.norm.eps == (norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)
    residual = getattr(theirs.model.layers[0], "residual_multiplier", 1.0)
    attended = getattr(config, "attention_in_multiplier", 1.0) * getattr(config, "attention_out_multiplier", 1.0)
    gate, down = getattr(config, "mlp_multipliers", (1.0, 1.0))
    attended *= getattr(config, "attention_value_scale", None) or 1.0
    scales = ours.config.attended_scale, ours.config.gate_scale, ours.config.fed_scale
    assert scales == (residual * attended, gate, residual * down)
    logits = getattr(config, "logit_scale", getattr(config, "lm_head_multiplier", 1.0))
    assert ours.config.logit_scale == logits / getattr(config, "logits_scaling", 1.0)
    assert ours.config.tie_word_embeddings == config.tie_word_embeddings
    scale = getattr(theirs.model, "embedding_multiplier", None)  # of granite, whose body multiplies
    embedded = ours.model.embed_tokens.scale, getattr(theirs.get_input_embeddings(), "embed_scale", scale)
    assert embedded[0] is embedded[1] is None or float(embedded[0]) == float(embedded[1])
    plan = ShardPlan({}, config.num_attention_heads, ours.config.num_key_value_heads, 0, 1)
    layout = cache_layout(ours.config, plan, np.dtype(np.float32), "cpu")
    assert cache_sources(ours.config) == cache_sources(config)
    assert [layer.window for layer in layout.layers] == [window_of(theirs, attention) for attention in attentions]
    rotated_layers = [
        one for one, kind in zip(ours.config.rotated, ours.config.layer_types, strict=True) if attends(kind)
    ]
    assert rotated_layers == [rotates(attention) for attention in attentions]
    for layer in theirs.model.layers:
        mixture = getattr(layer, "block_sparse_moe", getattr(layer, "mlp", getattr(layer, "mixer", None)))
        if hasattr(mixture, "experts"):
            router = getattr(mixture, "gate", None) or mixture.router
            assert ours.config.norm_topk_prob == getattr(router, "norm_topk_prob", True)
            assert ours.config.num_experts_per_tok == router.top_k
            assert ours.config.expert_scale == getattr(router, "routed_scaling_factor", 1.0)
            assert ours.config.expert_groups == getattr(router, "num_group", 1)
            assert ours.config.chosen_groups == getattr(router, "topk_group", 1)
            assert ours.config.clamp in (
                None,
                (getattr(mixture.experts, "alpha", 0), config.__dict__.get("swiglu_limit")),
            )


def shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """The parameters' shapes, by transformers' names."""
    if not isinstance(model, CausalModel):
        return {name: tuple(one.shape) for name, one in model.state_dict().items()}
    shapes_by_name = {f"{path}.{name}": one.shape for path, part in model.modules() for name, one in part.numbers()}
    for ours, theirs in FAMILIES[model.config.model_type].native_names:
        shapes_by_name = {name.replace(ours, theirs): shape for name, shape in shapes_by_name.items()}
    return shapes_by_name


def rotary_of(ours: Any, theirs: Any, kind: str) -> bool:
    """The rotary embedding of a kind of layers; raises where it is not transformers'."""
    both = ours.model.rotaries
    emb = theirs.model.pos_emb if hasattr(theirs.model, "pos_emb") else getattr(theirs.model, "rotary_emb", None)
    if emb is None:
        return not any(ours.config.rotated)
    found, prefix = (both[kind], f"{kind}_") if kind in both else (both[""], "")
    torch.testing.assert_close(torch.from_numpy(found.inv_freq), getattr(emb, f"{prefix}inv_freq"), rtol=1e-6, atol=0)
    assert found.attention_scaling == getattr(emb, f"{prefix}attention_scaling")
    return True


def window_of(model: Any, attention: Any) -> int | None:
    """The window that transformers' attention module, or the mask of the whole model, has."""
    if model.config.model_type == "llama4_text":
        chunked = model.config.layer_types[attention.layer_idx] == "chunked_attention"
        return model.config.attention_chunk_size if chunked else None
    if model.config.model_type in WITHOUT_LAYER_TYPES:
        return model.config.sliding_window
    return (getattr(attention, "sliding_window", None) or None) if getattr(attention, "is_sliding", True) else None


def rotates(attention: Any) -> bool:
    if hasattr(attention, "sliding_window_pattern"):  # exaone4
        return attention.sliding_window is None or attention.is_sliding
    if attention.config.model_type == "cohere2":
        return attention.sliding_window is not None
    if attention.config.model_type == "nemotron_h":
        return False
    if attention.config.model_type == "granitemoehybrid":
        return attention.config.position_embedding_type == "rope"
    return bool(getattr(attention, "use_rope", True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "its activation is gelu"),
        ({"head_dim": 24}, "its heads are 24 wide"),
        ({"partial_rotary_factor": 0.5}, r"only 0\.5 of its heads"),
        ({"rope_scaling": {"rope_type": "axial"}}, "of type axial"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, r"differ by layer \(full_attention\)"),
        ({"use_bidirectional_attention": True}, "its attention sees later tokens"),
        (
            {"model_type": "glm4_moe", "n_routed_experts": 4, "n_group": 4, "topk_group": 1, "num_experts_per_tok": 2},
            "1 of its 4 groups of 4 experts have not the 2",
        ),
        ({"model_type": "glm4_moe", "n_shared_experts": 0}, "it has no shared expert"),
        ({"model_type": "qwen3_5_text", "linear_key_head_dim": 24}, r"its recurrent heads are \(24, 128\) wide"),
        ({**HYBRID, "mamba_n_heads": 16}, "its Mamba heads are 8 wide"),
        ({**HYBRID, "mamba_d_state": 12}, "the states of its Mamba heads have 12 rows"),
        (
            {**FALCON, "attention_bias": True, "attention_in_multiplier": 0.5},
            "the inputs of its attention have a scale",
        ),
        ({"model_type": "lfm3", "attention_bias": True}, "gates of heads without a bias"),
        ({"model_type": "mimo_v2_flash", "v_head_dim": 64}, "its values are wider than its keys, 64 and 16"),
        ({"model_type": "mimo_v2_flash", "v_head_dim": 24}, "its values are 24 wide"),
        ({**FALCON, "mamba_proj_bias": True, "ssm_in_multiplier": 2.0}, "the inputs of its Mamba layers have a scale"),
    ],
)
def test_other_forms_are_left_to_transformers(changes: dict[str, Any], message: str) -> None:
    config = config_json("llama", **changes)
    with pytest.raises(NotNative, match=message):
        native_meta_model(native_config(config), config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_pre_attn_scalar": 0, "model_type": "gemma2"}, "query_pre_attn_scalar = 0; a number above 0"),
        ({"mlp_only_layers": [0.5], "model_type": "qwen3_moe"}, r"mlp_only_layers = \[0\.5\]; a list of whole"),
        ({"no_rope_layers": [1], "model_type": "smollm3"}, r"no_rope_layers = \[1\]; a list of 3"),
        ({"intermediate_size": "90"}, "intermediate_size = '90'"),
        ({"intermediate_size": None}, "intermediate_size = null; remove"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"rms_norm_eps": True}, "rms_norm_eps = True"),
        ({"use_sliding_window": True, "layer_types": ["full_attention"]}, "a list of num_hidden_layers = 3 kinds"),
        ({"model_type": "deepseek_v3", "head_dim": 16}, "head_dim = 16; qk_rope_head_dim = 64, or no such field"),
        ({"model_type": "exaone_moe", "mlp_layer_types": ["dense"] * 2}, "a list of 3 kinds, dense or sparse"),
        ({"model_type": "exaone_moe", "mlp_layer_types": ["dense", "wide", "sparse"]}, "dense or sparse"),
        ({"model_type": "ernie4_5_moe", "moe_layer_end_index": -2}, "moe_layer_end_index = -2; a layer, or -1"),
        ({"model_type": "nemotron_h", "layers_block_type": "M*"}, r"layers_block_type = M\*; a list of the kinds"),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, "attention_chunk_size = null; remove"),
        ({"model_type": "llama4_text", "no_rope_layers": 5}, "no_rope_layers = 5; a list of"),
        ({"model_type": "llama4_text", "moe_layers": "all"}, "moe_layers = 'all'; a list of whole numbers"),
        ({"model_type": "nemotron_h", "conv_kernel": 1}, "conv_kernel = 1; at least 2"),
        ({**FALCON, "mlp_multipliers": [1.0]}, r"mlp_multipliers = \[1\.0\]; a list of 2 numbers"),
        ({**FALCON, "ssm_multipliers": [1.0, 1.0, 0, 1.0, 1.0]}, "ssm_multipliers = 0; a number above 0"),
        ({**FALCON, "mamba_d_ssm": 121}, "their product must be mamba_d_ssm = 121"),
        ({**FALCON, "mamba_rms_norm": "no"}, "mamba_rms_norm = no; true or false"),
        ({"model_type": "phimoe", "router_jitter_noise": "0.01"}, "router_jitter_noise = '0.01'; a number"),
    ],
)
def test_values_of_a_wrong_type(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        validation.check(config_json("qwen3", **changes), 1)


def test_a_rotary_parameter_that_is_missing() -> None:
    with pytest.raises(ModelFilesError, match="factor = None among the rotary parameters"):
        rotaries({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear"}}, FAMILIES["llama"], 16, [])
