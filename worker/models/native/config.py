"""The configuration of a model whose forward is C++, read from config.json as transformers' class would read it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from control.errors import ModelFilesError
from worker.families.family import Family, Fields, Norms
from worker.families.fields import is_number
from worker.families.parts import SLIDING
from worker.families.recurrence import FULL, DeltaRule, Mamba, ShortConvolution
from worker.families.registry import FAMILIES
from worker.models.native.module import NotNative, require
from worker.models.native.rotary import mscale
from worker.native.library import GELU_TANH, MOST_STREAMS, RELU_SQUARED, SILU, WHOLE_VECTORS, XIELU
from worker.repository import validation
from worker.repository.config_fields import fields_of

_ACTIVATIONS = {"silu": SILU, "gelu_pytorch_tanh": GELU_TANH, "relu2": RELU_SQUARED, "xielu": XIELU}
HALF_VECTORS = WHOLE_VECTORS // 2
"""B and C of a group are convolved side by side."""
ACTIVATION_NAMES = ("hidden_activation", "hidden_act", "mlp_hidden_act")
EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")


def native_config(config: dict[str, Any], ranks: int = 1) -> SimpleNamespace:
    """The configuration of a model that validation.check accepts, with transformers' names and defaults.

    Raises NotNative for a model that needs transformers.
    """
    kind = config["model_type"]
    family = FAMILIES[kind]
    if not family.is_native:
        raise NotNative(f"{kind} has no meta model but transformers'")
    fields = fields_of(config, family)
    for name in family.torch_numbers:
        require(config.get(name) is None, f"it has {name} = {config.get(name)}")
    seeing = config.get("use_bidirectional_attention")
    require(not seeing or seeing == family.bidirectional_images, "its attention sees later tokens")
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    layers = config["num_hidden_layers"]
    latent = Latent.of(fields) if family.latent else None
    head_dim = latent.row if latent else fields.get("head_dim") or hidden // heads
    by_layer = _heads_by_layer(config, family, head_dim)
    for layer_config in by_layer:
        require(layer_config.head_dim % WHOLE_VECTORS == 0, f"its heads are {layer_config.head_dim} wide")
    activation: Any = next((fields[name] for name in ACTIVATION_NAMES if name in fields), "silu")
    require(activation in family.activations, f"its activation is {activation}")
    value_dim = None if latent else fields.get("v_head_dim")
    require((value_dim or 0) % WHOLE_VECTORS == 0, f"its values are {value_dim} wide")
    require((value_dim or 0) <= head_dim, f"its values are wider than its keys, {value_dim} and {head_dim}")
    recurrent = _recurrent(config, ranks)
    kinds = recurrent.pop("layer_types", None) or _layer_types(config, family, fields)
    widths = {(kind, layer_config.head_dim) for kind, layer_config in zip(kinds, by_layer, strict=True)}
    require(len(widths) == len(set(kinds)), "heads of layers of one kind differ in width")
    modes = _sharing_modes(kinds, fields.get("num_kv_shared_layers") or 0)
    all_biased = family.biased or bool(fields.get("use_bias"))
    attention_bias = bool(fields.get("attention_bias", all_biased))
    # A scale of inputs is one of queries, keys and values.
    attention_in = fields.get("attention_in_multiplier", 1.0)
    require(attention_in == 1 or not attention_bias, "the inputs of its attention have a scale")
    alternation = Alternation.of(fields) if "altup_num_inputs" in fields else None
    head_gates = bool(fields.get(family.head_gates or ""))
    require(not (head_gates and attention_bias), "its attention has gates of heads without a bias beside others")
    residual = fields.get("residual_multiplier", 1.0)
    gate_scale, down_scale = fields.get("mlp_multipliers") or (1.0, 1.0)
    scaling = _latent_scaling(latent, config, family) if latent else _scaling(family, fields, head_dim)
    return SimpleNamespace(
        model_type=kind,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        feed_forward_widths=_feed_forward_widths(
            fields.get("shared_intermediate_size") or family.feed_forward_width({**config, **fields}), config, fields
        ),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=validation.kv_heads(config),
        head_dim=head_dim,
        alternation=alternation,
        sparsity=fields.get("activation_sparsity_pattern") or [0.0] * layers,
        latent=latent,
        v_head_dim=value_dim,
        rope_neighbours=bool(fields.get("rope_interleave", family.rope_neighbours)),
        is_heterogeneous=True,
        per_layer_config=by_layer,
        kv_sharing_modes=modes,
        keys_are_values=[family.keys_are_values(fields, kind) for kind in kinds],
        hidden_size_per_layer_input=fields.get("hidden_size_per_layer_input") or 0,
        vocab_size_per_layer_input=fields.get("vocab_size_per_layer_input"),
        activation=_ACTIVATIONS[family.activations[activation]],
        rms_norm_eps=float(next(fields[name] for name in EPSILONS if name in fields)),
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        sliding_window=fields.get("sliding_window") or None,
        attention_chunk_size=fields.get("attention_chunk_size"),
        unweighted_head_norms=bool(fields.get(family.unweighted_head_norms or "")),
        layer_types=kinds,
        rotated=[family.rotates(fields, layer, kind) for layer, kind in enumerate(kinds)],
        scaling=scaling * attention_in**2 * fields.get("key_multiplier", 1.0),
        embedding_scale=hidden**0.5 if family.scaled_embedding else fields.get("embedding_multiplier"),
        # A scale of values is one of what attention makes of them.
        attended_scale=residual
        * attention_in
        * fields.get("attention_out_multiplier", 1.0)
        * (fields.get("attention_value_scale") or 1.0),
        fed_scale=residual * down_scale,
        gate_scale=gate_scale,
        logit_scale=fields.get("logit_scale", fields.get("lm_head_multiplier", 1.0))
        / fields.get("logits_scaling", 1.0),
        head_norms=family.head_norms if fields.get(family.head_norm_switch or "", True) else None,
        head_bias=family.biased or bool(fields.get(family.head_bias or "")),
        attention_cap=fields.get("attn_logit_softcapping") or 0.0,
        logit_cap=fields.get("final_logit_softcapping") or 0.0,
        norms=_norms(family, fields),
        head_gates=head_gates,
        query_key_value_bias=family.query_key_value_bias or bool(fields.get("qkv_bias", attention_bias)),
        output_bias=family.output_bias and bool(fields.get("attention_out_bias", attention_bias)),
        feed_forward_bias=bool(fields.get("mlp_bias", all_biased)),
        **recurrent,
        **(_experts(family, fields, layers) if family.has_experts(config) else {}),
    )


@dataclass(frozen=True)
class Latent:
    """The widths of attention over compressed keys and values: of what queries are made of (0: of the layer's input),
    of what keys and values of all heads are made of, of a head's part that positions turn, of its other part, and of
    values."""

    query_rank: int
    rank: int
    turned: int
    plain: int
    value_dim: int

    @staticmethod
    def of(fields: Fields) -> Latent:
        return Latent(
            query_rank=fields["q_lora_rank"] or 0,
            rank=fields["kv_lora_rank"],
            turned=fields["qk_rope_head_dim"],
            plain=fields["qk_nope_head_dim"],
            value_dim=fields["v_head_dim"],
        )

    @property
    def row(self) -> int:
        """Numbers that a position keeps for all heads."""
        return self.turned + self.rank


@dataclass(frozen=True)
class Alternation:
    """Hidden rows of several streams (AltUp): their number, the one that layers compute, if what its own input meets is
    scaled; and the rank of the residual beside attention (LAuReL)."""

    streams: int
    active: int
    scaled: bool
    rank: int

    @staticmethod
    def of(fields: Fields) -> Alternation:
        streams = fields["altup_num_inputs"]
        require(streams <= MOST_STREAMS, f"its hidden rows are {streams} streams")
        return Alternation(streams, fields["altup_active_idx"], fields["altup_correct_scale"], fields["laurel_rank"])


def _latent_scaling(latent: Latent, config: dict[str, Any], family: Family) -> float:
    """As transformers' `yarn_apply_mscale`."""
    scale = (latent.plain + latent.turned) ** -0.5
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    rope: dict[str, Any] = scaling or family.defaults["rope_parameters"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    every = rope.get("mscale_all_dim")
    if kind == "default" or not every:
        return scale
    if not is_number(every):
        raise ModelFilesError(
            f"config.json has mscale_all_dim = {every!r:.60} among the rotary parameters; give a number."
        )
    own_scale = mscale(rope.get("factor", 1.0), every)
    return scale * own_scale * own_scale


def _heads_by_layer(config: dict[str, Any], family: Family, head_dim: int) -> list[SimpleNamespace]:
    """Each layer's width of heads and number of key-value heads, by transformers' names."""
    usual = {"head_dim": head_dim, "num_key_value_heads": validation.kv_heads(config)}
    layers = config["num_hidden_layers"]
    fields_by_layer = [{}] * layers if family.heads_by_layer is None else family.heads_by_layer(config)
    return [SimpleNamespace(**usual | layer_fields) for layer_fields in fields_by_layer]


def _sharing_modes(kinds: list[str], shared: int) -> list[str | None]:
    """By layer, what it does with keys and values: "reuse" those of an earlier layer, as the last `shared` do, "store"
    its own for them, or None of both. The names are transformers'."""
    first = len(kinds) - shared
    modes: list[str | None] = [None] * first + ["reuse"] * shared
    for kind in set(kinds[first:]):
        modes[max(layer for layer in range(first) if kinds[layer] == kind)] = "store"
    return modes


def _norms(family: Family, fields: Fields) -> Norms:
    """Those of a layer, without what the type has only by a switch."""
    before_attention, _, before_feed_forward, _ = family.norms
    has_all = fields.get(family.after_norm_switch or "", True)
    return family.norms if has_all else (before_attention, None, before_feed_forward, None)


def _feed_forward_widths(usual: int | None, config: dict[str, Any], fields: Fields) -> list[int | None]:
    """The width of each layer's feed-forward network; None in a type with experts alone."""
    layers = range(config["num_hidden_layers"])
    if usual is None:
        return [None for _ in layers]
    return [2 * usual if validation.is_double_wide(config, fields, layer) else usual for layer in layers]


def _scaling(family: Family, fields: Fields, head_dim: int) -> float:
    """The factor of the products of queries and keys."""
    if not family.scores_scaled:
        return 1.0
    return fields.get("attention_multiplier") or fields.get("query_pre_attn_scalar", head_dim) ** -0.5


def _layer_types(config: dict[str, Any], family: Family, fields: Fields) -> list[str]:
    """By layer, if a token sees all positions before it, or only those of a sliding window, where there is a width."""
    if family.layer_kinds is not None:
        return family.layer_kinds(config)
    layers = config["num_hidden_layers"]
    if "sliding_window" not in fields or not fields.get("use_sliding_window", True):
        return [FULL] * layers
    kinds = fields.get("layer_types")
    period = fields.get("sliding_window_pattern", 1)
    if kinds is None:
        require(isinstance(period, int) and period > 0, f"the pattern of its windows is {period!r}")
        return [SLIDING if family.slides(fields, layer) else FULL for layer in range(layers)]
    return kinds


def _recurrent(config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The fields of a model with recurrent layers; none for another."""
    recurrence = validation.recurrence(config)
    if recurrence is None:
        return {}
    if isinstance(recurrence, ShortConvolution):
        require(recurrence.width // ranks % WHOLE_VECTORS == 0, f"a rank has {recurrence.width // ranks} channels")
        return {
            "layer_types": list(recurrence.kinds),
            "conv_L_cache": recurrence.taps,
            "conv_bias": config.get("conv_bias", False),
        }
    if isinstance(recurrence, Mamba):
        require(recurrence.head_dim % WHOLE_VECTORS == 0, f"its Mamba heads are {recurrence.head_dim} wide")
        require(recurrence.state % HALF_VECTORS == 0, f"the states of its Mamba heads have {recurrence.state} rows")
        require(recurrence.in_scale == 1 or not recurrence.in_bias, "the inputs of its Mamba layers have a scale")
        return {
            "layer_types": list(recurrence.kinds),
            "mamba": recurrence,
        }
    require(isinstance(recurrence, DeltaRule), f"its recurrent layers are {type(recurrence).__name__}s")
    assert isinstance(recurrence, DeltaRule)
    widths = recurrence.key_dim, recurrence.value_dim
    require(all(width % WHOLE_VECTORS == 0 for width in widths), f"its recurrent heads are {widths} wide")
    return {
        "layer_types": list(recurrence.kinds),
        "linear_conv_kernel_dim": recurrence.taps,
        "linear_num_key_heads": recurrence.key_heads,
        "linear_num_value_heads": recurrence.value_heads,
        "linear_key_head_dim": recurrence.key_dim,
        "linear_value_head_dim": recurrence.value_dim,
    }


def _experts(family: Family, fields: Fields, layers: int) -> dict[str, Any]:
    """The fields of a mixture of experts; none where it has 0 of them. `expert_layers` are those that have one."""
    experts = family.experts
    assert experts is not None
    count = fields[experts.count]
    experts_per_token = fields[experts.chosen]
    if count == 0:
        return {}
    groups = fields.get("n_group", 1)
    chosen_groups = fields.get("topk_group", 1)
    require(
        groups == 1 or count // groups * chosen_groups >= experts_per_token,
        f"{chosen_groups} of its {groups} groups of {count} experts have not the {experts_per_token} of a token",
    )
    inner = fields.get("moe_intermediate_size", fields.get("intermediate_size"))
    shared = fields.get("shared_expert_intermediate_size", fields.get("shared_intermediate_size", inner))
    shared = fields.get("moe_shared_expert_intermediate_size", shared)
    if experts.shared in fields:
        shared = inner * fields[experts.shared]
        require(shared > 0, "it has no shared expert")
    return {
        "num_experts": count,
        "num_experts_per_tok": experts_per_token,
        "moe_intermediate_size": inner,
        "shared_expert_intermediate_size": shared,
        "sigmoid_scores": experts.sigmoid_scores,
        "expert_groups": groups,
        "chosen_groups": chosen_groups,
        "expert_scale": fields.get("routed_scaling_factor", 1.0),
        # Types without the field have weights of the chosen experts that always add up to 1.
        "norm_topk_prob": bool(fields.get("norm_topk_prob", not experts.weighted_inputs)),
        "weighted_inputs": experts.weighted_inputs,
        "expert_layers": [layer for layer in range(layers) if experts.layers(fields, layer)],
        "expert_correction": experts.correction if fields.get(experts.correction_switch or "", True) else None,
        "expert_jitter": fields[experts.jitter] if experts.jitter else None,
        "least_sum": experts.least_sum,
        "clamp": (fields["swiglu_alpha"], fields["swiglu_limit"]) if "swiglu_limit" in fields else None,
    }
