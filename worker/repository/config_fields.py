"""Checks of the fields of config.json that every served model type reads: types, limits, and what must fit together.

A value that is missing has the default of transformers' class, except where all classes need one; null has a meaning
for a few fields alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from control.errors import ModelFilesAway, ModelFilesError, UnsupportedArchitecture
from worker.families.family import Family, one_for_all
from worker.families.fields import LARGEST, is_number, is_whole
from worker.families.parts import CHUNKED, SLIDING
from worker.families.recurrence import FULL
from worker.families.registry import FAMILIES

TIED = "tie_word_embeddings"
WIDEST_HEAD = 65536
LIMITS = {
    "num_hidden_layers": 4096,
    "num_attention_heads": 65536,
    "num_key_value_heads": 65536,
    **dict.fromkeys(("head_dim", "global_head_dim", "rotary_dim"), WIDEST_HEAD),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), WIDEST_HEAD),
}

ACTIVATIONS = {"hidden_act", "hidden_activation", "mlp_hidden_act"}
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
SIZES = {
    *("num_key_value_heads", "head_dim", "num_global_key_value_heads", "global_head_dim", "rotary_dim"),
    *("intermediate_size", "moe_intermediate_size"),
    *("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("num_experts_per_tok", "top_k_experts", "n_group", "topk_group"),
    *("decoder_sparse_step", "no_rope_layer_interval", "moe_layer_interval"),
    *("vocab_size_per_layer_input", "original_max_position_embeddings"),
    *("intermediate_size_mlp", "attention_chunk_size", "floor_scale", "interleave_moe_layer_step"),
    *("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    *("altup_num_inputs", "laurel_rank"),
}
"""Whole numbers from 1 on, and so are the numbers of experts."""
COUNTS = {
    *("sliding_window", "max_window_layers", "first_k_dense_replace", "n_shared_experts"),
    *("num_nextn_predict_layers", "num_kv_shared_layers", "hidden_size_per_layer_input"),
    *("num_dense_layers", "num_shared_experts", "moe_num_shared_experts", "moe_layer_start_index"),
    "altup_active_idx",
}
"""Whole numbers that may be 0."""
NUMBERS = {
    *("rope_theta", "rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "partial_rotary_factor"),
    *("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier", "attention_multiplier"),
    *("query_pre_attn_scalar", "swiglu_alpha", "swiglu_limit", "routed_scaling_factor"),
    *("attn_logit_softcapping", "final_logit_softcapping", "lm_head_multiplier"),
    *("attn_scale", "layer_norm_epsilon", "key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
    "attention_value_scale",
}
"""Numbers above 0."""
ROTARY_NUMBERS = (
    *("factor", "alpha", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"),
)
"""Numbers above 0 among the rotary parameters."""
LEAST_ROTARY = 1e-18
"""Of these numbers, so that no frequency overflows."""
ROTARY_BORDERS = ("beta_fast", "beta_slow")
ROTARY_FACTORS = ("attention_factor", "mscale", "mscale_all_dim", "llama_4_scaling_beta")
"""Numbers from 0 on among the rotary parameters."""
SWITCHES = {
    *("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "use_qk_norm", "qk_layernorm"),
    *(
        "attention_k_eq_v",
        "enable_moe_block",
        "use_double_wide_mlp",
        "use_sandwich_norm",
        "altup_correct_scale",
        "use_attention_gate",
        "use_expert_bias",
        "lm_head_bias",
        "rope_interleave",
    ),
}
MIXED = 2
"""Experts that a sparse mixer chooses, whatever config.json says."""
MOST_LEAST_SUM = 1e-6
"""Weights of a token's experts are divided by their sum, which is above it: a bound below has no effect."""
BY_LAYER = {"no_rope_layers", "mlp_only_layers", "moe_layers"}
"""Lists of whole numbers. One below 0 is no layer's number, as in transformers."""
MAY_BE_NULL = {
    *("head_dim", "rotary_dim", "sliding_window", "num_kv_shared_layers", "hidden_size_per_layer_input"),
    *("attn_logit_softcapping", "final_logit_softcapping", "q_lora_rank", "attention_value_scale", *BY_LAYER),
}
"""Fields for which null means that the model has none of it, or what follows from other fields. Where a type reads
another one, null is refused, as transformers' classes would fail on it."""
_EXPERTS_ALONE = {"num_experts", "top_k_experts", "moe_intermediate_size"}
"""Fields that a model without experts, of a type that may have them, may leave null."""


def read_json(path: Path) -> Any:
    """Raises ModelFilesError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelFilesError(f"{path} is not valid JSON: {error}") from error


def read_object(path: Path, required: bool = False) -> dict[str, Any]:
    """The JSON object in a file; empty if there is none. Raises ModelFilesError, and ModelFilesAway if a required one
    is missing."""
    if not path.is_file():
        if required:
            raise ModelFilesAway(f"{path} is missing: is {path.parent} a model folder?")
        return {}
    content = read_json(path)
    if not isinstance(content, dict):
        raise ModelFilesError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return cast(dict[str, Any], content)


def number(config: dict[str, Any], name: str) -> int:
    """A field that every model needs: a whole number from 1 on."""
    value = config.get(name)
    largest = LIMITS.get(name, LARGEST)
    if not is_whole(value, 1, largest):
        raise ModelFilesError(
            f"config.json has {name} = {_shown(value)}; a positive whole number is needed, at most {largest}."
        )
    return value


def check(config: dict[str, Any], family: Family) -> None:
    """Raise ModelFilesError or UnsupportedArchitecture naming a field and its value."""
    for name in NEEDED:
        number(config, name)
    present = {name: config[name] for name in config if config[name] is not None}
    for name in ACTIVATIONS & present.keys():
        if not isinstance(present[name], str):
            raise _wrong(name, present[name], "a text")
    for name, value in {**present, **fields_of(config, family)}.items():
        _check_value(name, one_for_all(name, value, family), family)
    ids = config.get("vocab_size_per_layer_input")
    if (
        config.get("hidden_size_per_layer_input")
        and ids is not None
        and ids < config["vocab_size"]
        and not family.layer_ids_end
    ):
        raise _wrong("vocab_size_per_layer_input", ids, f"at least vocab_size = {config['vocab_size']}")
    if family.recurrent is None:  # families/recurrence.py checks the layers of those
        _check_layers(config, family)
    rotated = config.get("no_rope_layers")
    layers = config["num_hidden_layers"]
    if "no_rope_layers" in family.fields and rotated is not None and len(rotated) < layers:
        raise _wrong("no_rope_layers", rotated, f"a list of {layers}")
    _check_latent(config, family)
    _check_alternation(config, family)
    _check_heads_by_layer(config, family)
    _check_shared_layers(config, family)
    _check_experts(config, family)
    _check_sparse_layers(config, family)
    _check_rope(config, family)


def check_head_width(config: dict[str, Any], family: Family) -> None:
    """Raise ModelFilesError for heads whose width follows from `hidden_size`, and is that of none; and for heads of
    another width than their norms have."""
    head_dim = config.get("head_dim")
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    width = hidden // heads
    if head_dim is None and width > WIDEST_HEAD and family.latent is None:
        raise _wrong("hidden_size", hidden, f"a size by which a head has at most {WIDEST_HEAD}")
    switch = family.head_norm_switch
    if not family.head_norms_by_hidden_size or (switch is not None and not field_value(config, family, switch)):
        return
    if head_dim is not None and head_dim != width:
        raise _wrong("head_dim", head_dim, f"hidden_size / num_attention_heads = {width}, or no such field,")
    if family.head_norms == "all_heads" and hidden % heads:
        raise _wrong("hidden_size", hidden, f"a multiple of num_attention_heads = {heads}")


def fields_of(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """The fields that a forward in C++ reads, by their own names; a field that the file lacks has the default of
    transformers' class."""
    absent = _EXPERTS_ALONE if family.experts is not None and not family.has_experts(config) else ()
    return {name: field_value(config, family, name) for name in family.fields if name not in absent}


def _check_value(name: str, value: Any, family: Family) -> None:
    experts = family.experts
    counts = () if experts is None else (experts.count, experts.chosen)
    if value is None and name in MAY_BE_NULL:
        return
    if value is None and name in SIZES | COUNTS | NUMBERS | BY_LAYER:
        raise ModelFilesError(f"config.json has {name} = null; remove the field, or give it a value.")
    if name in counts and experts is not None and experts.may_lack and is_whole(value, 0, 0):
        return
    if name in SIZES or name in counts:
        number({name: value}, name)
    elif name in COUNTS and not is_whole(value, 0):
        raise _wrong(name, value, "a whole number from 0 on")
    elif name in NUMBERS or name in family.torch_numbers:
        _check_positive(name, value)
    elif name in SWITCHES and not isinstance(value, bool | None):
        raise _wrong(name, value, "true or false")
    elif name in BY_LAYER and not (
        isinstance(value, list) and all(is_whole(element, -LARGEST) for element in cast(list[Any], value))
    ):
        raise _wrong(name, value, "a list of whole numbers")


def token_ids(source: dict[str, Any], name: str) -> list[int] | None:
    """One id or a list of them; None where there is none."""
    value = source.get(name)
    values: list[Any] = cast(list[Any], value) if isinstance(value, list) else [value]
    if value is None:
        return None
    if not all(is_whole(token, 0) for token in values):
        raise _wrong(name, value, "a token id or a list of them")
    return values


def _check_layers(config: dict[str, Any], family: Family) -> None:
    """Each layer has a kind that is known, full attention or another one, and a window where it needs one."""
    narrow = CHUNKED if "attention_chunk_size" in family.fields else SLIDING
    kinds = config.get("layer_types")
    layers = config["num_hidden_layers"]
    if kinds is None and family.layer_kinds is not None and narrow == SLIDING:
        kinds = family.layer_kinds(config)
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(cast(list[Any], kinds)) != layers:
        raise _wrong("layer_types", kinds, f"a list of num_hidden_layers = {layers} kinds")
    for kind in cast(list[Any], kinds):
        if kind not in (narrow, FULL):
            raise UnsupportedArchitecture(
                f"config.json has a layer of type {_shown(kind)} in layer_types. Served are {narrow} and {FULL}."
            )
    off = config.get("use_sliding_window") is False
    if SLIDING in kinds and not off and "sliding_window" in config and not config["sliding_window"]:
        raise _wrong("sliding_window", config["sliding_window"], f"a width, as layer_types has {SLIDING},")


def _check_heads_by_layer(config: dict[str, Any], family: Family) -> None:
    by_layer = config.get("per_layer_config")
    if not family.lists_heads:
        if by_layer is not None:
            raise UnsupportedArchitecture(
                f"config.json has per_layer_config = {_shown(by_layer)}, which model type "
                f"'{config.get('model_type')}' is not served with."
            )
        return
    if by_layer is not None and not isinstance(by_layer, dict):
        raise _wrong("per_layer_config", by_layer, "an object")
    for layer, fields in cast(dict[str, Any], by_layer or {}).items():
        # transformers writes the numbers of a model with more than ten layers as 00, 01 and so on.
        if not (layer.isascii() and layer.isdigit() and len(layer) < 9 and int(layer) < config["num_hidden_layers"]):
            raise _wrong("per_layer_config", layer, f"a layer below num_hidden_layers = {config['num_hidden_layers']}")
        if not isinstance(fields, dict) or set(cast(dict[str, Any], fields)) - {"head_dim", "num_key_value_heads"}:
            raise _wrong(f"per_layer_config.{layer}", fields, "an object with head_dim and num_key_value_heads alone")
        for name in cast(dict[str, Any], fields):
            number(cast(dict[str, Any], fields), name)


def _check_shared_layers(config: dict[str, Any], family: Family) -> None:
    """Layers that share keys and values have one of their kind before them."""
    if "num_kv_shared_layers" not in family.fields:
        return
    kinds = [] if family.layer_kinds is None else family.layer_kinds(config)
    shared = fields_of(config, family)["num_kv_shared_layers"] or 0
    if shared and set(kinds[:-shared]) != set(kinds):
        raise _wrong(
            "num_kv_shared_layers",
            shared,
            f"a number that leaves a layer of each kind ({', '.join(sorted(set(kinds)))})",
        )


def field_value(config: dict[str, Any], family: Family, name: str) -> Any:
    """The value of a field: under its other name where the file has that one, else its own, else the default."""
    aliased = config.get(family.aliases.get(name, ""))
    value = config.get(name, family.defaults.get(name)) if aliased is None else aliased
    return one_for_all(name, value, family)


def set_field(config: dict[str, Any], name: str, value: Any) -> None:
    """Give a field another value, under its own name alone: the other name would win."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None:
        config.pop(family.aliases.get(name, ""), None)
    config[name] = value


def is_tied(config: dict[str, Any]) -> bool:
    """True if the head of the text part is its embedding, by config.json or the default of the type."""
    family = FAMILIES.get(str(config.get("model_type")))
    return bool(config.get(TIED) if family is None else field_value(config, family, TIED))


def _check_experts(config: dict[str, Any], family: Family) -> None:
    experts = family.experts
    if experts is None or not family.has_experts(config):
        return
    if experts.switch is not None:
        number(config, "moe_intermediate_size")
    numbers = {name: field_value(config, family, name) for name in (experts.count, experts.chosen)}
    for name, value in numbers.items():
        if value != 0 or experts.switch is not None:  # some types have no experts then
            number(numbers, name)
    count, per_token = numbers.values()
    if count and per_token > count:
        raise _wrong(experts.chosen, per_token, f"at most {experts.count} = {count}")
    if experts.jitter is not None and per_token != MIXED:
        raise UnsupportedArchitecture(
            f"config.json has {experts.chosen} = {per_token}; a sparse mixer chooses {MIXED} experts of a token."
        )
    if "n_group" in family.fields:
        groups = field_value(config, family, "n_group")
        chosen_groups = field_value(config, family, "topk_group")
        if count % groups:
            raise _wrong("n_group", groups, f"a divisor of {experts.count} = {count}")
        if count < 2 * groups:  # a group is chosen by the sum of its two best
            raise _wrong("n_group", groups, f"a number that leaves 2 of {experts.count} = {count} to a group")
        if chosen_groups > groups:
            raise _wrong("topk_group", chosen_groups, f"at most n_group = {groups}")


def _check_latent(config: dict[str, Any], family: Family) -> None:
    """A width of heads beside those that attention over compressed keys and values has."""
    width = config.get("head_dim")
    if family.latent is None or width is None or "qk_rope_head_dim" in family.aliases:
        return
    fields = fields_of(config, family)
    expected = fields["qk_rope_head_dim"] + (fields["qk_nope_head_dim"] if family.latent == "whole" else 0)
    if width != expected:
        field_name = "qk_rope_head_dim" if family.latent == "turned" else "qk_nope_head_dim + qk_rope_head_dim"
        raise _wrong("head_dim", width, f"{field_name} = {expected}, or no such field,")


def _check_alternation(config: dict[str, Any], family: Family) -> None:
    """Of a type with several streams of hidden rows, and shares of inner values that stay 0."""
    if "altup_num_inputs" not in family.fields:
        return
    fields = fields_of(config, family)
    active = fields["altup_active_idx"]
    if active >= fields["altup_num_inputs"]:
        raise _wrong("altup_active_idx", active, f"a number below altup_num_inputs = {fields['altup_num_inputs']}")
    layers = config["num_hidden_layers"]
    shares: Any = fields["activation_sparsity_pattern"]
    fits = isinstance(shares, list) and len(cast(list[Any], shares)) == layers
    if not fits or not all(is_number(share) and 0 <= share < 1 for share in shares):
        raise _wrong("activation_sparsity_pattern", shares, f"a list of {layers} numbers from 0 on, below 1,")


def _check_sparse_layers(config: dict[str, Any], family: Family) -> None:
    layers = config["num_hidden_layers"]
    kinds: Any = config.get("mlp_layer_types")
    if "mlp_layer_types" in family.fields and kinds is not None:
        fits = isinstance(kinds, list) and len(cast(list[Any], kinds)) == layers
        if not fits or any(kind not in ("dense", "sparse") for kind in kinds):
            raise _wrong("mlp_layer_types", kinds, f"a list of {layers} kinds, dense or sparse,")
    last = config.get("moe_layer_end_index", -1)
    if "moe_layer_end_index" in family.fields and not is_whole(last, -1):
        raise _wrong("moe_layer_end_index", last, "a layer, or -1 for the last one,")
    jitter = config.get("router_jitter_noise", 0.0)
    if "router_jitter_noise" in family.fields and not is_number(jitter):
        raise _wrong("router_jitter_noise", jitter, "a number")
    if "moe_norm_min" in family.fields:
        least = field_value(config, family, "moe_norm_min")
        if not is_number(least) or not least >= 0:
            raise _wrong("moe_norm_min", least, "a number from 0 on")
        if least > MOST_LEAST_SUM:
            raise UnsupportedArchitecture(
                f"config.json has moe_norm_min = {least}: sums of weights of experts are served as they are. A model "
                f"with {MOST_LEAST_SUM} or less can be served."
            )


def _check_part_of_heads(name: str, rope: dict[str, Any], config: dict[str, Any], family: Family) -> None:
    """Scaled embeddings of a part of each head, in a type whose heads are turned whole: transformers' own forward fails
    on them."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if part in (None, 1) or kind in ("default", "proportional") or family.turns_parts:
        return
    raise UnsupportedArchitecture(
        f"config.json has partial_rotary_factor = {_shown(part)} with the rotary embedding '{kind}' in {name}; model "
        f"type '{config['model_type']}' turns whole heads. Set it to 1, or remove it."
    )


def _has_layers(config: dict[str, Any], kind: str) -> bool:
    """False for a kind that `layer_types` does not list."""
    kinds = config.get("layer_types")
    return not isinstance(kinds, list) or kind in kinds


def _check_rope(config: dict[str, Any], family: Family) -> None:
    """Rotary embeddings that can be batched; one for all layers, or one by kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise _wrong(name, rope, "an object")
        whole = cast(dict[str, Any], rope)
        if family.rope_by_kind:
            _check_rope_by_kind(name, whole, family)
        by_kind = {
            kind: cast(dict[str, Any], parameters) for kind, parameters in whole.items() if isinstance(parameters, dict)
        }
        for parameters in [whole, *by_kind.values()]:
            _check_rotary(name, parameters, family)
        for parameters in [parameters for kind, parameters in by_kind.items() if _has_layers(config, kind)] or [whole]:
            _check_part_of_heads(name, parameters, config, family)


def _check_rope_by_kind(name: str, rope: dict[str, Any], family: Family) -> None:
    """Parameters of kinds of layers are objects. A type whose thetas have no fields of their own has them there."""
    listed = {kind: rope[kind] for kind in family.rope_by_kind if rope.get(kind) is not None}
    for kind, parameters in listed.items():
        if not isinstance(parameters, dict):
            raise _wrong(f"{name}.{kind}", parameters, "an object")
    if any(family.rope_by_kind.values()):
        return
    if name == "rope_scaling" or not listed:
        kinds = " and ".join(sorted(family.rope_by_kind))
        raise _wrong(name, rope, f"rope_parameters of the kinds {kinds} of layers")
    for kind, parameters in listed.items():
        if cast(dict[str, Any], parameters).get("rope_theta") is None:
            raise _wrong(f"{name}.{kind}", parameters, "an object with rope_theta")


def _check_rotary(name: str, rope: dict[str, Any], family: Family) -> None:
    kind = rope.get("rope_type", rope.get("type"))
    if kind is not None and not isinstance(kind, str):
        raise _wrong(f"{name}.rope_type", kind, "a text")
    if kind in family.longrope_names:
        kind = "longrope"
    fixed = kind == "dynamic" and family.fixed_alpha and rope.get("alpha") is not None
    if kind is not None and kind not in family.rope_types and not fixed:
        why = "depends on the longest sequence of the batch, so answers would depend on other requests"
        reason = why if kind in ("dynamic", "longrope") else "is not known"
        raise UnsupportedArchitecture(
            f"Rotary embedding '{kind}' {reason}. Use a checkpoint with {', '.join(sorted(family.rope_types))}."
        )
    for field in ROTARY_NUMBERS:
        value = rope.get(field)
        if field in ROTARY_BORDERS and value == 0:  # transformers takes its own number then
            continue
        if value is not None:
            _check_positive(f"{name}.{field}", value)
            if value < LEAST_ROTARY:
                raise _wrong(f"{name}.{field}", value, f"at least {LEAST_ROTARY}")
    for field in ROTARY_FACTORS:
        if (value := rope.get(field)) is not None and not (is_number(value) and 0 <= value <= LARGEST):
            raise _wrong(f"{name}.{field}", value, "a number from 0 on")
    if not isinstance(rope.get("truncate"), bool | None):
        raise _wrong(f"{name}.truncate", rope["truncate"], "true or false")
    if family.latent and kind not in (None, "default") and rope.get("mscale_all_dim") and rope.get("factor") is None:
        raise _wrong(f"{name}.factor", None, "a number, as mscale_all_dim is there,")
    if kind == "yarn" and rope.get("rope_theta") == 1:
        raise _wrong(f"{name}.rope_theta", 1, "a number other than 1")


def _check_positive(name: str, value: object) -> None:
    is_part = name.endswith("partial_rotary_factor")
    if not is_number(value) or not 0 < value <= (1 if is_part else LARGEST**2):
        raise _wrong(name, value, "a number above 0, at most 1" if is_part else "a number above 0")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _wrong(name: str, value: object, needed: str) -> ModelFilesError:
    return ModelFilesError(f"config.json has {name} = {_shown(value)}; {needed} is needed.")
