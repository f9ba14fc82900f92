"""The model types whose forward is C++.

A layer is: norm, attention, sum, norm, gated feed-forward, sum. Rotary embeddings turn whole heads, halves as pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class NativeFamily:
    """`fields` are the fields of config.json that the model type reads beside those that all have, with the values that
    transformers' class has where config.json omits them. A field that is not among them has no effect."""

    fields: dict[str, Any]
    query_key_value_bias: bool = False
    """True if these projections always have a bias. The field `attention_bias` gives one to them and, unless there is a
    field `attention_out_bias`, to the output."""
    head_norms: bool = False
    """True if each head of query and key has a norm."""
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    """Other names of fields in config.json, by the field."""


_COMMON: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "head_dim": None}
_WINDOWS: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_LLAMA: dict[str, Any] = {"intermediate_size": 11008, "attention_bias": False, "mlp_bias": False}
_SEED_OSS: dict[str, Any] = {
    "intermediate_size": 27648,
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 128,
}
_QWEN3: dict[str, Any] = {"intermediate_size": 22016, "attention_bias": False, "head_dim": 128}

FAMILIES: dict[str, NativeFamily] = {
    "internlm3": NativeFamily(
        _COMMON | _LLAMA | {"intermediate_size": 10240, "rms_norm_eps": 1e-5, "head_dim": 128},
        aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    ),
    "llama": NativeFamily(_COMMON | _LLAMA),
    "ministral": NativeFamily(_COMMON | {"intermediate_size": 14336, "sliding_window": 4096, "layer_types": None}),
    "mistral": NativeFamily(_COMMON | {"intermediate_size": 14336, "sliding_window": 4096}),
    "qwen2": NativeFamily(_COMMON | _WINDOWS | {"intermediate_size": 22016}, query_key_value_bias=True),
    "qwen3": NativeFamily(_COMMON | _WINDOWS | _QWEN3, head_norms=True),
    "seed_oss": NativeFamily(_COMMON | _LLAMA | _SEED_OSS),
}
