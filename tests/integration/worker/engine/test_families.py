"""Records of families fit transformers' plans; and the tiny models of the parity tests have the parts that their types
are about."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests import models
from worker.families.family import Family
from worker.families.registry import FAMILIES
from worker.models.torch.meta_model import meta_model, register_unlisted
from worker.weights.sharding import IN_LAYER

WITHOUT_PLAN = {"falcon_h1", "gpt_oss", "hunyuan_v1_dense", "lfm2", "lfm3"}
"""Types of which transformers has no plan."""

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}

WHOLE = {"replicated_with_grad_allreduce", "replicated", "mla_kv_a_proj", "local_params"}
GATHERED = {"colwise_gather_output", "rowwise_split_input"}
NAMES = {"colwise": "colwise", "rowwise": "rowwise", "moe_tp_experts": "experts"}

WHOLE_ON_RANKS = {
    *("per_layer_input_gate", "per_layer_projection", "laurel.linear_left", "laurel.linear_right"),
    *(f"altup.{name}" for name in ("modality_router", "prediction_coefs", "correction_coefs")),
}
"""Small matrices of gemma3n and gemma4 that each rank has whole."""

BEYOND_THE_PLAN = {
    # Copied on every rank by transformers.
    "qwen2_moe": {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "cohere": {"self_attn.q_norm", "self_attn.k_norm"},
    "deepseek_v3": {"self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"},
    "mistral4": {"self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj"},
    "glm4_moe_lite": {"self_attn.q_proj", *(f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down"))},
    "exaone_moe": {f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
    "granitemoe": ATTENTION,
    "granitemoeshared": {*ATTENTION, "shared_mlp.input_linear", "shared_mlp.output_linear"},
    "hunyuan_v1_moe": {*ATTENTION, *(f"mlp.shared_mlp.{name}_proj" for name in ("gate", "up", "down"))},
    "lfm2_moe": {
        *(f"self_attn.{name}_proj" for name in "qkv"),
        *("self_attn.out_proj", "conv.in_proj", "conv.conv", "conv.out_proj"),
        *(f"feed_forward.w{number}" for number in (1, 2, 3)),
    },
    "phimoe": ATTENTION,
    "nemotron_h": {
        *(f"mixer.{name}_proj" for name in ("in", "out", "q", "k", "v", "o", "up", "down")),
        *(f"mixer.{name}" for name in ("conv1d", "A_log", "D", "dt_bias", "norm")),
        *("mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"),
    },
    "granitemoehybrid": {
        *ATTENTION,
        *("shared_mlp.input_linear", "shared_mlp.output_linear"),
        *(f"mamba.{name}" for name in ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")),
    },
}


@functools.cache
def tiny(family: str) -> Any:
    register_unlisted(family)
    return meta_model(
        CONFIG_MAPPING[family](**models.SHAPE | models.FAMILY_SHAPES[family]), torch.float32, torch.device("cpu")
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_roles_are_those_of_transformers(family: str) -> None:
    """The record has the plan of the installed transformers. Furrow keeps outputs split that a plan gathers, and splits
    more in such a type."""
    plan: dict[str, str] = CONFIG_MAPPING[family]().base_model_tp_plan or {}
    theirs = {
        name.removeprefix("layers.*."): role
        for name, role in plan.items()
        # Within experts the roles are those of whole tensors, which the loader knows.
        if role not in WHOLE and ".experts." not in name and role != "embedding_rowwise"
    }
    roles, gathered = FAMILIES[family].roles, {name for name, role in theirs.items() if role in GATHERED}
    assert (not plan) == (family in WITHOUT_PLAN)
    assert set(theirs) <= set(roles)
    assert all(roles[name] == NAMES[role] for name, role in theirs.items() if name not in gathered)
    if plan and not gathered:
        assert set(roles) - set(theirs) == BEYOND_THE_PLAN.get(family, set())


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_matrix_has_a_role(family: str) -> None:
    """In each layer all matrices but routers have a role, and each role is that of a part that the tiny model has."""
    model, roles = tiny(family), FAMILIES[family].roles
    inside = {match[1]: module for name, module in model.named_modules() if (match := IN_LAYER.fullmatch(name))}
    parameters = {match[1] for name, _ in model.named_parameters() if (match := IN_LAYER.fullmatch(name))}
    either = {"self_attn.q_proj", "self_attn.q_b_proj"} if FAMILIES[family].latent else set[str]()
    assert set(roles) - either <= inside.keys() | parameters
    assert len(either & inside.keys()) == len(either) // 2
    linears = {name for name, module in inside.items() if isinstance(module, nn.Linear)}
    routers = {"mlp.gate", "mlp.gate.wg", "mlp.router", "router.proj", "feed_forward.router"}
    shared = {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"}  # what all heads are made of
    assert linears - roles.keys() <= {"mlp.shared_expert_gate", *shared, *routers, *WHOLE_ON_RANKS}


# --- the parts that a type is about ----------------------------------------------------------------------------------


def part(name: str) -> Callable[[Any], bool]:
    """A module or parameter in some layer."""
    return lambda model: any(
        (match := IN_LAYER.fullmatch(one)) and match[1] == name
        for one in [*dict(model.named_modules()), *dict(model.named_parameters())]
    )


def biased(name: str) -> Callable[[Any], bool]:
    return part(f"{name}.bias")


def sliding(model: Any) -> bool:
    """Windows that the prompts of the parity tests outgrow."""
    kinds = getattr(model.config, "layer_types", None) or ["sliding_attention"]
    return model.config.sliding_window == 12 and "sliding_attention" in kinds


def alternating(model: Any) -> bool:
    return sliding(model) and set(model.config.layer_types) == {"sliding_attention", "full_attention"}


def partly_rotated(model: Any) -> bool:
    frequencies = model.get_submodule(model.base_model_prefix).rotary_emb.inv_freq
    return 0 < 2 * frequencies.numel() < 16


def scaled_rotary(model: Any) -> bool:
    """Scaled for a context that the parity tests outgrow."""
    rope = model.config.rope_parameters
    return any(
        one.get("original_max_position_embeddings", 64) <= 16 for one in [rope, *rope.values()] if isinstance(one, dict)
    )


def norm_over(width: int, query: str = "q_norm", key: str = "k_norm") -> Callable[[Any], bool]:
    """Norms of query and key with weights of a head of 16, or of all four and two heads."""

    def has(model: Any) -> bool:
        attention = next(layer.self_attn for layer in model.base_model.layers if hasattr(layer, "self_attn"))
        return [getattr(attention, name).weight.numel() for name in (query, key)] == [width, min(width, 32)]

    return has


def uneven(model: Any) -> bool:
    """Layers of full attention have wider heads, fewer of them for keys, which are the values too."""
    sliding, full = (model.model.layers[layer].self_attn for layer in (0, 2))
    widths = [one.q_norm.weight.numel() for one in (sliding, full)]
    keys = [one.k_proj.out_features for one in (sliding, full)]
    return (widths, keys, sliding.v_proj is None, full.v_proj is None) == ([16, 32], [32, 32], False, True)


def sharing(model: Any) -> bool:
    """The last layer of each kind attends to keys and values of an earlier one."""
    shared = [hasattr(layer.self_attn, "k_proj") for layer in model.model.layers]
    modes = [None, "store", "store", "reuse", "reuse"]
    return model.config.kv_sharing_modes == modes and shared == [True, True, True, False, False]


def wider_behind(model: Any) -> bool:
    """The feed-forward networks of layers that share keys and values are wider."""
    return [layer.mlp.down_proj.in_features for layer in model.model.layers] == [90, 90, 90, 180, 180]


def proportional(model: Any) -> bool:
    """Some pairs of the full layers' heads are not rotated."""
    frequencies = model.model.rotary_emb.full_attention_inv_freq
    return frequencies.numel() == 16 and 0 < frequencies.count_nonzero() < 16


def config(name: str, wanted: object = True) -> Callable[[Any], bool]:
    return lambda model: getattr(model.config, name) == wanted


def tied(model: Any) -> bool:
    return model.config.tie_word_embeddings


def neighbours(model: Any) -> bool:
    """Pairs of the rotary embedding lie next to each other."""
    module = sys.modules[type(model).__module__]
    if not hasattr(module, "rotate_half"):  # they are complex numbers
        return "view_as_complex" in inspect.getsource(module.apply_rotary_emb)
    turned = module.rotate_half(torch.arange(4.0))
    return turned.tolist() == [-1.0, 0.0, -3.0, 2.0]


def recurrent(model: Any) -> bool:
    """Recurrent layers beside attention, two value heads to a key head."""
    layers = model.base_model.layers
    deltas = [layer.linear_attn for layer in layers if hasattr(layer, "linear_attn")]
    gated = [layer.self_attn for layer in layers if hasattr(layer, "self_attn")]
    return (
        [(one.num_k_heads, one.num_v_heads, one.conv_kernel_size) for one in deltas] == [(2, 4, 4)] * 2
        and [one.q_proj.out_features for one in gated] == [2 * 64]
        and set(model.config.layer_types) == {"linear_attention", "full_attention"}
    )


def convolving(model: Any) -> bool:
    """Convolutions of three inputs beside attention with normed heads, and a feed-forward width of another formula."""
    layers = model.model.layers
    convolutions = [layer.conv.conv.weight.shape for layer in layers if hasattr(layer, "conv")]
    attending = [layer.self_attn.q_layernorm.weight.numel() for layer in layers if hasattr(layer, "self_attn")]
    widths = {layer.feed_forward.w1.out_features for layer in layers}
    kinds = set(model.config.layer_types)
    return (convolutions, attending, widths, kinds) == ([(64, 1, 3)] * 2, [16], {75}, {"conv", "full_attention"})


def mamba(model: Any) -> bool:
    """Mamba layers beside one that attends, without positions."""
    layers = [layer.mamba for layer in model.model.layers]
    return (
        [one is None for one in layers] == [False, True, False]
        and all((one.num_heads, one.ssm_state_size, one.conv_kernel_size) == (8, 8, 4) for one in layers if one)
        and model.model.rotary_emb is None
    )


def chunks(model: Any) -> bool:
    """Chunks that the prompts of the parity tests outgrow, beside layers without positions, and norms of heads."""
    kinds = {"chunked_attention", "full_attention"}
    attentions = [layer.self_attn for layer in model.model.layers]
    normed = [hasattr(one, "qk_norm") for one in attentions]
    return (
        model.config.attention_chunk_size == 12
        and set(model.config.layer_types) == kinds
        and normed == [True, False] * 2
    )


def doubled(model: Any) -> bool:
    """Layers with a window have sinks, and twice the key-value heads of the other one."""
    attentions = [layer.self_attn for layer in model.model.layers]
    keys = [(one.sinks is None, one.k_proj.out_features) for one in attentions]
    return keys == [(False, 96), (True, 48), (False, 96)]


def mamba_everywhere(model: Any) -> bool:
    """A Mamba layer of two groups beside the attention of each layer."""
    layers = model.model.layers
    return all(layer.mamba.n_groups == 2 and layer.self_attn.key_multiplier == 0.5 for layer in layers)


def parts_of_record(family: Family) -> Iterator[Callable[[Any], bool]]:
    """The parts that the record of a type names. Those with a role are tested above."""
    if family.rope_neighbours:
        yield neighbours
    if family.is_native:
        yield from (part(name) for name in family.norms if name is not None)
        if family.head_norms is not None:
            theirs = dict(family.native_names)
            names = [f".self_attn.{name}" for name in family.head_norm_names]
            names = [theirs.get(name, name).rpartition(".")[2] for name in names]
            yield norm_over(64 if family.head_norms in ("all_heads", "each_own_head") else 16, *names)


PARTS: dict[str, list[Callable[[Any], bool]]] = {
    "apertus": [config("hidden_act", "xielu"), norm_over(16), part("mlp.act_fn.alpha_p")],
    "arcee": [config("hidden_act", "relu2"), biased("mlp.up_proj")],
    "cohere": [part("self_attn.q_norm"), tied, neighbours, config("logit_scale", 0.5)],
    "cohere2": [alternating, tied, neighbours, config("logit_scale", 0.5)],
    "deepseek_v3": [
        *(scaled_rotary, biased("self_attn.kv_a_proj_with_mqa"), part("self_attn.q_b_proj"), config("n_group", 2)),
        *(part("mlp.experts"), part("mlp.shared_experts"), part("mlp.gate_proj"), config("v_head_dim", 10)),
    ],
    "dots1": [
        *(alternating, norm_over(16), biased("self_attn.o_proj"), config("n_group", 2)),
        *(config("routed_scaling_factor", 1.5), config("norm_topk_prob")),
        *(part("mlp.experts"), part("mlp.shared_experts"), part("mlp.gate_proj")),
    ],
    "ernie4_5": [tied, neighbours, biased("self_attn.q_proj"), biased("mlp.down_proj")],
    "ernie4_5_moe": [
        *(
            neighbours,
            biased("self_attn.q_proj"),
            biased("mlp.shared_experts.up_proj"),
            part("mlp.experts"),
            part("mlp.gate_proj"),
        ),
        *(lambda model: model.lm_head.bias is not None, part("mlp.gate.moe_statics.e_score_correction_bias")),
    ],
    "exaone_moe": [
        *(alternating, norm_over(16), config("n_group", 2), config("routed_scaling_factor", 1.5)),
        *(part("mlp.experts"), part("mlp.shared_experts"), part("mlp.gate_proj")),
    ],
    "exaone4": [alternating, norm_over(16), part("post_feedforward_layernorm")],
    "falcon_h1": [mamba_everywhere, part("mamba.norm"), biased("mamba.conv1d"), config("ssm_out_multiplier", 0.6)],
    "gemma": [tied, config("hidden_act", "gelu_pytorch_tanh")],
    "gemma2": [sliding, tied, config("attn_logit_softcapping", 5.0), part("pre_feedforward_layernorm")],
    "gemma3_text": [alternating, tied, norm_over(16), part("pre_feedforward_layernorm")],
    "gemma3n_text": [
        *(alternating, tied, sharing, norm_over(16), config("final_logit_softcapping", 10.0)),
        *(part("altup.modality_router"), part("laurel.linear_left"), part("per_layer_input_gate")),
        lambda model: [layer.mlp.activation_sparsity for layer in model.model.layers] == [0.9, 0.6, 0.0, 0.3, 0.0],
        lambda model: model.config.vocab_size_per_layer_input < 128,
    ],
    "gemma4_text": [
        *(alternating, tied, uneven, sharing, wider_behind, proportional, config("final_logit_softcapping", 10.0)),
        *(part("experts.gate_up_proj"), part("router.per_expert_scale"), part("mlp.gate_proj")),
        *(part("per_layer_input_gate"), lambda model: "layer_scalar" in dict(model.model.layers[0].named_buffers())),
    ],
    "glm": [partly_rotated, neighbours, biased("self_attn.q_proj"), part("mlp.gate_up_proj")],
    "glm4": [partly_rotated, neighbours, part("mlp.gate_up_proj"), part("post_self_attn_layernorm")],
    "glm4_moe": [
        *(partly_rotated, norm_over(16), config("n_group", 2), config("routed_scaling_factor", 1.5)),
        *(part("mlp.experts"), part("mlp.shared_experts"), part("mlp.gate_proj")),
    ],
    "glm4_moe_lite": [
        *(part("self_attn.q_proj"), part("self_attn.kv_b_proj"), config("v_head_dim", 24)),
        *(part("mlp.experts"), part("mlp.shared_experts"), part("mlp.gate_proj")),
    ],
    "gpt_oss": [
        *(alternating, scaled_rotary, part("self_attn.sinks"), biased("self_attn.o_proj")),
        *(part("mlp.experts.gate_up_proj_bias"), part("mlp.experts.down_proj_bias"), config("swiglu_limit", 1.5)),
    ],
    "granite": [config("residual_multiplier", 0.5), config("logits_scaling", 2.0)],
    "granitemoe": [part("block_sparse_moe.experts"), config("residual_multiplier", 0.5)],
    "granitemoeshared": [part("block_sparse_moe.experts"), part("shared_mlp"), config("logits_scaling", 2.0)],
    "granitemoehybrid": [
        *(mamba, part("block_sparse_moe.experts"), part("shared_mlp"), biased("mamba.conv1d")),
        *(config("residual_multiplier", 0.5), config("embedding_multiplier", 2.0), config("logits_scaling", 2.0)),
    ],
    "hunyuan_v1_dense": [part("self_attn.query_layernorm"), biased("self_attn.o_proj")],
    "hunyuan_v1_moe": [
        *(part("self_attn.query_layernorm"), biased("self_attn.o_proj"), part("mlp.experts")),
        *(part("mlp.shared_mlp.down_proj"), config("moe_topk", [2, 2, 2])),
    ],
    "internlm3": [biased("self_attn.q_proj"), biased("self_attn.o_proj")],
    "lfm2": [
        *(convolving, tied, biased("conv.in_proj"), biased("conv.conv"), biased("conv.out_proj")),
        *(part("self_attn.k_layernorm"), part("feed_forward.w3"), part("operator_norm"), part("ffn_norm")),
    ],
    "lfm3": [
        *(tied, biased("conv.in_proj"), biased("conv.conv"), norm_over(16), part("self_attn.g_proj")),
        *(part("post_operator_norm"), part("post_ffn_norm"), part("feed_forward.w3"), config("sliding_window", 12)),
        lambda model: set(model.config.layer_types) == {"conv", "full_attention", "sliding_attention"},
    ],
    "lfm2_moe": [
        *(biased("conv.in_proj"), part("self_attn.k_layernorm"), part("operator_norm"), part("feed_forward.w3")),
        *(part("feed_forward.experts"), config("use_expert_bias"), config("routed_scaling_factor", 1.5)),
    ],
    "llama4_text": [chunks, part("feed_forward.experts"), part("feed_forward.shared_expert"), config("floor_scale", 8)],
    "llama": [lambda model: model.config.rope_parameters["rope_type"] == "llama3"],
    "mimo_v2_flash": [
        *(alternating, doubled, biased("self_attn.q_proj"), config("v_head_dim", 32), config("n_group", 2)),
        *(part("mlp.experts"), part("mlp.gate_proj"), config("attention_value_scale", 0.5)),
    ],
    "minimax_m2": [norm_over(64), part("mlp.experts"), partly_rotated],
    "ministral": [alternating],
    "ministral3": [scaled_rotary, lambda model: model.config.rope_parameters["llama_4_scaling_beta"] == 0.1],
    "mistral": [sliding],
    "mistral4": [
        *(scaled_rotary, part("self_attn.q_b_proj"), part("mlp.experts"), part("mlp.shared_experts")),
        *(config("n_group", 2), lambda model: model.config.rope_parameters["llama_4_scaling_beta"] == 0.1),
    ],
    "mixtral": [part("mlp.experts")],
    "nemotron_h": [part("mixer.experts"), part("mixer.shared_experts"), biased("mixer.conv1d"), part("mixer.q_proj")],
    "olmo2": [norm_over(64), part("post_feedforward_layernorm")],
    "olmo3": [alternating, norm_over(64), scaled_rotary, part("post_feedforward_layernorm")],
    "phi": [partly_rotated, part("self_attn.q_layernorm"), biased("self_attn.dense")],
    "phi3": [sliding, partly_rotated, part("self_attn.qkv_proj"), part("mlp.gate_up_proj")],
    "phimoe": [
        *(sliding, biased("self_attn.o_proj"), biased("input_layernorm"), part("mlp.experts")),
        lambda model: model.lm_head.bias is not None,
    ],
    "qwen2": [tied, biased("self_attn.q_proj")],
    "qwen2_moe": [part("mlp.experts"), part("mlp.shared_expert"), part("mlp.gate_proj"), biased("self_attn.q_proj")],
    "qwen3": [tied, norm_over(16)],
    "qwen3_5_moe_text": [recurrent, partly_rotated, part("mlp.experts"), part("mlp.shared_expert")],
    "qwen3_5_text": [recurrent, partly_rotated, part("mlp.gate_proj"), part("linear_attn.in_proj_z")],
    "qwen3_moe": [part("mlp.experts"), part("mlp.gate_proj"), norm_over(16)],
    "qwen3_next": [
        *(recurrent, partly_rotated, part("mlp.experts"), part("mlp.shared_expert"), part("mlp.gate_proj")),
        part("linear_attn.in_proj_qkvz"),
    ],
    "seed_oss": [biased("self_attn.q_proj"), biased("self_attn.o_proj"), biased("mlp.up_proj")],
    "smollm3": [config("no_rope_layers", [1, 0, 1])],
    "starcoder2": [sliding, biased("self_attn.q_proj"), biased("mlp.c_fc")],
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_tiny_model_has_what_its_type_is_about(family: str) -> None:
    """A parity test proves a part only if the model has it: windows, sinks, experts, norms, biases, rotary kinds."""
    model = tiny(family)
    parts = [*parts_of_record(FAMILIES[family]), *PARTS.get(family, [])]
    assert [index for index, has in enumerate(parts) if not has(model)] == []
