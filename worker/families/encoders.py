"""The encoders that are served: how their configurations and the names of their tensors differ from BERT's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.families.fields import is_whole
from worker.families.parts import SLIDING
from worker.families.recurrence import FULL


@dataclass(frozen=True)
class EncoderFamily:
    """`padded`: positions begin behind the padding id, which is `padding` whatever config.json says. `types`: the two
    texts of a pair are told apart. `scores`: the head of a cross-encoder is known. `relative`: attention has a learned
    bias by distance. `rotary`: ModernBERT's form, with rotary positions and local layers. `fields` maps
    BERT's names of configuration fields to the family's, `tensors` those of a layer's parts; `layers` is what comes
    before the number of a layer."""

    padded: bool = False
    padding: int | None = None
    types: bool = True
    scores: bool = True
    relative: bool = False
    rotary: bool = False
    fields: Mapping[str, str] = field(default_factory=dict[str, str])
    layers: str = "encoder.layer."
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])


_ROBERTA = EncoderFamily(padded=True)
ENCODERS: dict[str, EncoderFamily] = {
    "bert": EncoderFamily(),
    "camembert": _ROBERTA,
    "distilbert": EncoderFamily(
        types=False,
        scores=False,
        fields={
            "hidden_size": "dim",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        layers="transformer.layer.",
        tensors={
            "attention.self.query": "attention.q_lin",
            "attention.self.key": "attention.k_lin",
            "attention.self.value": "attention.v_lin",
            "attention.output.dense": "attention.out_lin",
            "attention.output.LayerNorm": "sa_layer_norm",
            "intermediate.dense": "ffn.lin1",
            "output.dense": "ffn.lin2",
            "output.LayerNorm": "output_layer_norm",
        },
    ),
    "modernbert": EncoderFamily(types=False, scores=False, rotary=True, fields={"hidden_act": "hidden_activation"}),
    "mpnet": EncoderFamily(
        padded=True,
        padding=1,
        types=False,
        relative=True,
        tensors={
            "attention.self.query": "attention.attn.q",
            "attention.self.key": "attention.attn.k",
            "attention.self.value": "attention.attn.v",
            "attention.output.dense": "attention.attn.o",
            "attention.output.LayerNorm": "attention.LayerNorm",
        },
    ),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}

ACTIVATIONS = {"gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu"}
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_LAYERS = 4096
_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}


def unified(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with BERT's names of its fields; of another type as it is. Raises UnsupportedArchitecture and
    ModelFilesError."""
    family = ENCODERS.get(config["model_type"])
    if family is None:
        return config
    own_fields = {name: config[own_name] for name, own_name in family.fields.items() if own_name in config}
    unified_config = {**config, **own_fields}
    if not family.types:
        unified_config["type_vocab_size"] = 0
    if config["model_type"] == "distilbert":
        unified_config["layer_norm_eps"] = 1e-12
    return unified_config | (_local_layers(unified_config) if family.rotary else {})


def renamed(name: str, family: EncoderFamily) -> str:
    """The family's name of a tensor that BERT has under `name`."""
    before, separator, inside = name.partition("encoder.layer.")
    if before or not separator:
        return name
    index, _, inside = inside.partition(".")
    part, _, leaf = inside.rpartition(".")
    return f"{family.layers}{index}.{family.tensors.get(part, part)}.{leaf}"


def check_encoder(config: dict[str, Any]) -> None:
    """Raise UnsupportedArchitecture or ModelFilesError naming the field of a `unified` configuration."""
    family = ENCODERS[config["model_type"]]
    for name in (*_SIZES, "max_position_embeddings"):
        value = config.get(name)
        if not is_whole(value):
            own_name = family.fields.get(name, name)
            raise ModelFilesError(f"config.json has {own_name} = {value!r}; a positive whole number is needed.")
    if config["num_hidden_layers"] > _LAYERS:
        raise ModelFilesError(f"config.json has num_hidden_layers = {config['num_hidden_layers']}; at most {_LAYERS}.")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise UnsupportedArchitecture(
            f"hidden_size = {config['hidden_size']} can't be divided among {config['num_attention_heads']} heads."
        )
    if (act := config.get("hidden_act", "gelu")) not in ACTIVATIONS:
        raise UnsupportedArchitecture(f"The activation {act!r} is not served. Served are {sorted(ACTIVATIONS)}.")
    if (kind := config.get("position_embedding_type", "absolute")) != "absolute" and not family.rotary:
        raise UnsupportedArchitecture(f"position_embedding_type = {kind!r} is not served; 'absolute' is.")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise UnsupportedArchitecture("is_decoder or add_cross_attention is set: only encoders are served.")
    if family.relative and (buckets := config.get("relative_attention_num_buckets", 32)) != 32:
        raise UnsupportedArchitecture(f"relative_attention_num_buckets = {buckets!r} is not served; 32 is.")
    if positions(config) < 1:
        raise ModelFilesError(f"config.json has max_position_embeddings = {config['max_position_embeddings']}.")


def positions(config: dict[str, Any]) -> int:
    """Tokens of the longest input by the model's table of positions."""
    return int(config["max_position_embeddings"]) - first_position(config)


def first_position(config: dict[str, Any]) -> int:
    """The place in the table of positions of an input's first token."""
    family = ENCODERS.get(config["model_type"])
    if family is None or not family.padded:
        return 0
    padding = config.get("pad_token_id") if family.padding is None else family.padding
    return (padding if isinstance(padding, int) else 1) + 1


def _local_layers(config: dict[str, Any]) -> dict[str, Any]:
    """ModernBERT's `layer_types`, and `thetas` of its rotary positions by type of layer."""
    count = config.get("num_hidden_layers")
    every = config.get("global_attn_every_n_layers", 3)
    if not isinstance(count, int) or not 0 <= count <= _LAYERS:
        return {}  # refused by its name later
    kinds = config.get("layer_types")
    if kinds is None:
        if not isinstance(every, int) or every < 1:
            raise ModelFilesError(f"config.json has global_attn_every_n_layers = {every!r}; 1 or more is needed.")
        kinds = [SLIDING if index % every else FULL for index in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {SLIDING, FULL}:  # pyright: ignore[reportUnknownArgumentType]
        raise ModelFilesError(f"config.json must have layer_types for {count} layers, each {SLIDING!r} or {FULL!r}.")
    window = config.get("local_attention", 128)
    if not isinstance(window, int) or window < 0:
        raise ModelFilesError(f"config.json has local_attention = {window!r}; 0 or more is needed.")
    return {"layer_types": kinds, "local_attention": window, "thetas": {kind: _theta(config, kind) for kind in _THETAS}}


def _theta(config: dict[str, Any], kind: str) -> float:
    name, default = _THETAS[kind]
    parameters: dict[str, Any] = (config.get("rope_parameters") or {}).get(kind) or {}
    scaling = parameters.get("rope_type", "default") if config.get("rope_scaling") is None else config["rope_scaling"]
    theta = parameters.get("rope_theta", config.get(name))
    theta = default if theta is None else theta
    if scaling != "default" or not isinstance(theta, int | float) or not theta > 0:
        raise UnsupportedArchitecture(
            f"config.json has rotary positions of {kind} with {scaling!r} and theta {theta!r}; served is 'default' "
            "with a positive number."
        )
    return float(theta)
