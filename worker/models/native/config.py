"""The configuration of a model whose forward is C++, read from config.json as transformers' class would read it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from control.errors import ModelFilesError
from worker.models.native.families import FAMILIES
from worker.models.native.plan import ACTIVATIONS, WHOLE_VECTORS
from worker.models.native.unsupported import NotNative, require
from worker.repository import validation

SLIDING, FULL = "sliding_attention", "full_attention"


def native_config(config: dict[str, Any]) -> SimpleNamespace:
    """The configuration of a model that validation.check accepts, with transformers' names and defaults.

    Raises NotNative for a model that needs transformers, ModelFilesError for a value of a wrong type.
    """
    kind = config["model_type"]
    if kind not in FAMILIES:
        raise NotNative(f"{kind} has no meta model but transformers'")
    family = FAMILIES[kind]
    aliases = family.aliases
    fields = {name: config.get(name, config.get(aliases.get(name, ""), value)) for name, value in family.fields.items()}
    _check(fields)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if fields["head_dim"] is None:
        fields["head_dim"] = hidden // heads
    require(fields["hidden_act"] in ACTIVATIONS, f"its activation is {fields['hidden_act']}")
    require(fields["head_dim"] % WHOLE_VECTORS == 0, f"its heads are {fields['head_dim']} wide")
    attention_bias = bool(fields.get("attention_bias"))
    feed_forward_bias = bool(fields.get("mlp_bias"))
    kinds = _layer_types(fields, config["num_hidden_layers"])
    return SimpleNamespace(
        model_type=kind,
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        intermediate_size=fields["intermediate_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=validation.kv_heads(config),
        head_dim=fields["head_dim"],
        hidden_act=fields["hidden_act"],
        rms_norm_eps=float(fields["rms_norm_eps"]),
        tie_word_embeddings=bool(fields["tie_word_embeddings"]),
        sliding_window=fields["sliding_window"] if SLIDING in kinds else None,
        layer_types=kinds,
        head_norms=family.head_norms,
        query_key_value_bias=family.query_key_value_bias or attention_bias,
        output_bias=bool(fields.get("attention_out_bias", attention_bias)),
        feed_forward_bias=feed_forward_bias,
    )


def _check(fields: dict[str, Any]) -> None:
    """Raise ModelFilesError for a number of a wrong type."""
    whole = {"intermediate_size": 1, "head_dim": 1, "sliding_window": 1, "max_window_layers": 0}
    for name, least in whole.items():
        value = fields.get(name)
        if value is None and name != "intermediate_size":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelFilesError(f"config.json has {name} = {value!r}; a whole number from {least} on is needed.")
    epsilon = fields["rms_norm_eps"]
    if not isinstance(epsilon, int | float) or isinstance(epsilon, bool):
        raise ModelFilesError(f"config.json has rms_norm_eps = {epsilon!r}; a number is needed.")


def _layer_types(fields: dict[str, Any], layers: int) -> list[str]:
    """By layer, if a token sees all positions before it, or only those of a sliding window."""
    if fields.get("sliding_window") is None or not fields.get("use_sliding_window", True):
        return [FULL] * layers
    given = fields.get("layer_types")
    if given is None:
        first = fields.get("max_window_layers", 0)
        return [SLIDING if layer >= first else FULL for layer in range(layers)]
    if not isinstance(given, list) or len(given) != layers:
        raise ModelFilesError(f"config.json has layer_types = {given!r}; a list of {layers} is needed.")
    strange = sorted({str(one) for one in given} - {SLIDING, FULL})
    require(not strange, f"it has layers of type {', '.join(strange)}")
    return given
