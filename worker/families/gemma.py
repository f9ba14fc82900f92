"""gemma to gemma3. gemma3n has hidden rows of several streams (AltUp), a residual of low rank beside attention
(LAuReL), inputs of the layers, gates of which most stay 0, and shared keys and values."""

from __future__ import annotations

from typing import Any, cast

from worker.families.family import AROUND, Family, Images, TextPart
from worker.families.gguf import AROUND_LAYER_NAMES, LAYER_NAMES, Gguf, Metadata, layers_described
from worker.families.parts import DENSE, OMITTED, SIZES, SLIDING, WINDOWS, all_but_every, all_but_every_pattern
from worker.families.recurrence import FULL

_GEMMA = (*SIZES, "intermediate_size", "attention_bias")
_GEMMA2 = (*_GEMMA, *WINDOWS, "hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping")
_27B_LAYERS = 62
_GEMMA2_27B_LAYERS = 46
_PATTERN = 6
"""Every sixth layer of gemma3 attends to all positions."""


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    layers = common["num_hidden_layers"]
    heads = common["num_attention_heads"]
    # llama.cpp knows the one size whose scale is no head's by its number of layers.
    scalar = common["hidden_size"] // heads if layers == _27B_LAYERS else common["head_dim"]
    local = {"rope_type": "default", "rope_theta": model.real("gemma3.rope.freq_base_swa", 10000.0)}
    pattern = model.whole("gemma3.attention.sliding_window_pattern", _PATTERN)
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": model.whole("gemma3.attention.sliding_window"),
        "layer_types": [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in layers_described(model, layers)],
        "rope_parameters": {FULL: common["rope_parameters"], SLIDING: local},
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": model.real("gemma3.final_logit_softcapping", None),
    }


def _gemma_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False}


def _gemma2_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    layers = common["num_hidden_layers"]
    heads = common["num_attention_heads"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": common["hidden_size"] // heads if layers == _GEMMA2_27B_LAYERS else common["head_dim"],
        "sliding_window": model.whole("gemma2.attention.sliding_window"),
        "layer_types": [FULL if layer % 2 else SLIDING for layer in layers_described(model, layers)],
        "attention_bias": False,
        "attn_logit_softcapping": model.real("gemma2.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.real("gemma2.final_logit_softcapping", 30.0),
    }


_GEMMA3N_PATTERN = 5
"""Every fifth layer attends to all positions."""
_SPARSE = [0.95] * 10
"""The shares of the gate that stay 0 in the first layers of a model that has more of them."""


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the shares that follow from the number of layers, and one width of the feed-forward networks
    where all have it. Numbers that are none stay, and are refused later."""
    layers = config.get("num_hidden_layers", 35)
    if config.get("activation_sparsity_pattern") is None and isinstance(layers, int) and 0 < layers < 4096:
        sparse = _SPARSE if layers > len(_SPARSE) else []
        config = config | {"activation_sparsity_pattern": [*sparse, *[0.0] * (layers - len(sparse))]}
    widths = config.get("intermediate_size")
    if isinstance(widths, list) and widths and len(set(map(str, cast(list[Any], widths)))) == 1:
        config = config | {"intermediate_size": widths[0]}
    return config


def layer_kinds(config: dict[str, Any]) -> list[str]:
    layers = range(config["num_hidden_layers"])
    kinds: list[str] | None = config.get("layer_types")
    return kinds or [SLIDING if (layer + 1) % _GEMMA3N_PATTERN else FULL for layer in layers]


FAMILIES = [
    Family(
        "gemma",
        DENSE,
        (*_GEMMA, "hidden_act"),
        # Older files name the exact function and mean the approximation.
        activations={"gelu_pytorch_tanh": "gelu_pytorch_tanh", "gelu": "gelu_pytorch_tanh", "silu": "silu"},
        norm_offset=True,
        scaled_embedding=True,
        gguf=(Gguf("gemma", _gemma_from_gguf, LAYER_NAMES),),
    ),
    Family(
        "gemma2",
        DENSE,
        (*_GEMMA2, "attn_logit_softcapping"),
        norms=AROUND,
        norm_offset=True,
        scaled_embedding=True,
        slides=all_but_every(2),
        gguf=(Gguf("gemma2", _gemma2_from_gguf, AROUND_LAYER_NAMES),),
    ),
    Family(
        "gemma3_text",
        DENSE,
        (*_GEMMA2, "sliding_window_pattern"),
        norms=AROUND,
        norm_offset=True,
        head_norms="each_head",
        scaled_embedding=True,
        rope_by_kind={FULL: "rope_theta", SLIDING: "rope_local_base_freq"},
        slides=all_but_every_pattern,
        gguf=(Gguf("gemma3", _from_gguf, AROUND_LAYER_NAMES),),
        pooling="bidirectional",
    ),
    Family(
        "gemma3n_text",
        DENSE,
        (
            *(*_GEMMA, *WINDOWS, "hidden_activation", "final_logit_softcapping"),
            *("num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
            *("altup_num_inputs", "altup_active_idx", "altup_correct_scale", "laurel_rank"),
            "activation_sparsity_pattern",
        ),
        one_for_all=frozenset({"intermediate_size"}),
        completed=completed,
        norms=AROUND,
        head_norms="each_head",
        value_norm=True,
        scores_scaled=False,
        scaled_embedding=True,
        layer_kinds=layer_kinds,
        layer_ids_end=True,
        rope_by_kind={FULL: "rope_theta", SLIDING: "rope_local_base_freq"},
        rotates_apart=True,
    ),
]

TEXT_PARTS = [
    TextPart("gemma3", "gemma3_text", tied=True, omitted=OMITTED, images=Images("siglip", token=262144)),
    TextPart("gemma3n", "gemma3n_text", tied=True, omitted=(*OMITTED, "hidden_size_per_layer_input", "laurel_rank")),
]
