from __future__ import annotations

import math
from typing import Any

from worker.families.family import AROUND, BATCHABLE_ROPE, Experts, Family, TextPart
from worker.families.gguf import AROUND_LAYER_NAMES, OUTER_NAMES, Gguf, Metadata, gated_names, layers_described
from worker.families.parts import DENSE, OMITTED, SIZES, SLIDING, WINDOWS
from worker.families.recurrence import FULL


def layer_kinds(config: dict[str, Any]) -> list[str]:
    """Each layer's kind of attention. The last layer has full attention, whatever the file says."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or [FULL if layer % 6 == 5 else SLIDING for layer in range(layers)]
    return [*kinds[:-1], FULL]


def heads_by_layer(config: dict[str, Any]) -> list[dict[str, int]]:
    """transformers saves them as `per_layer_config`; Google's files name those of the layers with full attention.
    `config` must have been checked."""
    by_layer = config.get("per_layer_config")
    if by_layer is not None:
        fields = {int(layer): layer_fields for layer, layer_fields in by_layer.items()}
        return [fields.get(layer, {}) for layer in range(config["num_hidden_layers"])]
    full = {"head_dim": config.get("global_head_dim") or 512}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = config["num_global_key_value_heads"]
    return [full if kind == FULL else {} for kind in layer_kinds(config)]


_GGUF_NAMES = AROUND_LAYER_NAMES | {
    ".layer_scalar": "layer_output_scale.weight",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
    "router.proj": "ffn_gate_inp",
    "router.scale": "ffn_gate_inp.scale",
    "router.per_expert_scale": "ffn_down_exps.scale",
    **gated_names("experts", "_exps"),
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
}
_GGUF_OUTER = OUTER_NAMES | {
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}
_UNTURNED = 1e29
"""Factors above it are those of frequencies that don't turn."""


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    layers = layers_described(model, common["num_hidden_layers"])
    slides = model.array("gemma4.attention.sliding_window_pattern").numbers()
    if len(slides) != common["num_hidden_layers"] or slides[-1]:
        raise model.wrong(
            "gemma4.attention.sliding_window_pattern", slides[:8], "one for each layer, the last one false, is needed"
        )
    shared = model.whole("gemma4.attention.shared_kv_layers", 0, least=0)
    full = common["head_dim"]
    heads = _of_layers(model, "gemma4.attention.head_count_kv", common["num_attention_heads"], slides)
    usual = next((count for count, sliding in zip(heads, slides, strict=True) if sliding), heads[-1])
    table = model.tensors.get("per_layer_token_embd.weight")
    own_layers = [
        layer for layer in layers if f"blk.{layer}.attn_k.weight" in model.tensors and layer < len(slides) - shared
    ]
    return {
        "head_dim": model.whole("gemma4.attention.key_length_swa"),
        "num_key_value_heads": usual,
        "per_layer_config": {
            str(layer): {"head_dim": full, "num_key_value_heads": heads[layer]} for layer in layers if not slides[layer]
        },
        "attention_k_eq_v": any(f"blk.{layer}.attn_v.weight" not in model.tensors for layer in own_layers),
        "layer_types": [SLIDING if sliding else FULL for sliding in slides],
        "sliding_window": model.whole("gemma4.attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": _is_double_wide(model, shared, slides),
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": model.real("gemma4.final_logit_softcapping", None),
        "hidden_size_per_layer_input": model.whole("gemma4.embedding_length_per_layer_input", 0, least=0),
        "vocab_size_per_layer_input": common["vocab_size"] if table is None else table.shape[0],
        "rope_parameters": {
            FULL: common["rope_parameters"]
            | {"rope_type": "proportional", "partial_rotary_factor": _turned(model, full)},
            SLIDING: {"rope_type": "default", "rope_theta": model.real("gemma4.rope.freq_base_swa", 10000.0)},
        },
        **_experts_from_gguf(model),
    }


def _of_layers(model: Metadata, key: str, default: int, slides: list[Any]) -> list[int]:
    """A number of each layer; files may have one for all."""
    numbers = model.numbers(key, default)
    numbers = numbers * len(slides) if len(numbers) == 1 else numbers
    if len(numbers) != len(slides) or min(numbers) < 1:
        raise model.wrong(key, numbers[:8], f"{len(slides)} whole numbers from 1 on are needed")
    return numbers


def _is_double_wide(model: Metadata, shared: int, slides: list[Any]) -> bool:
    """True if the feed-forward networks of layers that share keys and values are twice as wide as others."""
    key = "gemma4.feed_forward_length"
    widths = _of_layers(model, key, 0, slides)
    first = len(slides) - shared
    if set(widths[:first]) != {widths[0]} or set(widths[first:]) - {widths[0], 2 * widths[0]}:
        raise model.wrong(key, widths[:8], "one width, and twice that in layers with shared keys, is served")
    if len(set(widths[first:])) > 1:
        raise model.wrong(key, widths[first:][:8], "one width of layers with shared keys is served")
    return shared > 0 and widths[-1] == 2 * widths[0]


def _turned(model: Metadata, width: int) -> float:
    """The part of a head that positions turn: its frequencies are as they are, all others stand still."""
    factors = model.factors(width)
    count = sum(factor == 1 for factor in factors)
    if (
        not count
        or any(factor != 1 for factor in factors[:count])
        or any(factor < _UNTURNED for factor in factors[count:])
    ):
        raise model.wrong("rope_freqs.weight", factors[:4], "ones, and behind them numbers of 1e30, are needed")
    part = 2 * count / width
    return part if int(part * width // 2) == count else math.nextafter(part, 2)


def _experts_from_gguf(model: Metadata) -> dict[str, Any]:
    count = model.whole("gemma4.expert_count", 0, least=0)
    if not count:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": model.whole("gemma4.expert_used_count"),
        "moe_intermediate_size": model.whole("gemma4.expert_feed_forward_length"),
    }


FAMILIES = [
    Family(
        "gemma4_text",
        {**DENSE, "experts": "experts"},
        (
            *(*SIZES, *WINDOWS, "intermediate_size", "attention_bias", "hidden_activation", "final_logit_softcapping"),
            *("num_kv_shared_layers", "attention_k_eq_v", "use_double_wide_mlp"),
            *("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
            *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
        ),
        norms=AROUND,
        head_norms="each_head",
        value_norm=True,
        keys_are_values=lambda fields, kind: fields["attention_k_eq_v"] and kind == FULL,
        scores_scaled=False,
        scaled_embedding=True,
        layer_scales=True,
        layer_kinds=layer_kinds,
        lists_heads=True,
        rope_by_kind={FULL: None, SLIDING: None},
        rotates_apart=True,
        rope_types=BATCHABLE_ROPE | {"proportional"},
        experts=Experts(
            ("experts.{}.gate_proj.weight", "experts.{}.up_proj.weight", "experts.{}.down_proj.weight"),
            chosen="top_k_experts",
            switch="enable_moe_block",
            stored_above=("experts.gate_up_proj", "experts.down_proj"),
            router="router",
            router_scales=True,
            beside=("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        ),
        heads_by_layer=heads_by_layer,
        bidirectional_images="vision",
        gguf=(Gguf("gemma4", _from_gguf, _GGUF_NAMES, outer=_GGUF_OUTER, layers_differ=True),),
    )
]

TEXT_PARTS = [TextPart("gemma4", "gemma4_text", tied=True, omitted=OMITTED)]
