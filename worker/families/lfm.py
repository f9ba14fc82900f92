"""lfm2: short convolutions and attention. lfm3 has windows, norms around both, and a gate for each head beside them."""

from __future__ import annotations

from typing import Any

from control.errors import ModelFilesError
from worker.families.family import BATCHABLE_ROPE, Experts, Family, Roles
from worker.families.fields import size, switch
from worker.families.gguf import WEIGHTS_BY_NUMBER, Gguf, Metadata, experts_described, gated_names
from worker.families.parts import ATTENTION, QUERY_KEY_VALUE, SLIDING, gated
from worker.families.recurrence import (
    CONVOLUTION,
    FULL,
    LINEAR,
    ShortConvolution,
    checked_kinds,
    feed_forward_width,
    short_convolutions_of,
)

_CONVOLUTION: Roles = {"conv.in_proj": "regions", "conv.conv": "colwise", "conv.out_proj": "rowwise"}
_FEED_FORWARD = gated("feed_forward", WEIGHTS_BY_NUMBER)
_ATTENTION: Roles = {**QUERY_KEY_VALUE, "self_attn.out_proj": "rowwise"}
_NATIVE_NAMES = (
    (".mlp.gate_proj", ".feed_forward.w1"),
    (".mlp.up_proj", ".feed_forward.w3"),
    (".mlp.down_proj", ".feed_forward.w2"),
    ("model.norm.", "model.embedding_norm."),
)
_LFM2_NATIVE_NAMES = (
    *_NATIVE_NAMES,
    (".self_attn.o_proj", ".self_attn.out_proj"),
    (".self_attn.q_norm", ".self_attn.q_layernorm"),
    (".self_attn.k_norm", ".self_attn.k_layernorm"),
)
_FIELDS = ("norm_eps", "tie_word_embeddings", "head_dim")

_GGUF_NAMES = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    **gated_names("feed_forward", "", WEIGHTS_BY_NUMBER),
}
_MOE_NAMES = {
    **_GGUF_NAMES,
    **gated_names("feed_forward.experts", "_exps", WEIGHTS_BY_NUMBER),
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
}
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm", "lm_head": "output"}


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    name = model.architecture
    heads = model.array(f"{name}.attention.head_count_kv").numbers()[: common["num_hidden_layers"]]
    return {
        "norm_eps": common["rms_norm_eps"],
        "layer_types": [FULL if head_count else CONVOLUTION for head_count in heads],
        "conv_L_cache": model.whole(f"{name}.shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def _moe_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    dense = model.whole("lfm2moe.leading_dense_block_count", 0, least=0)
    return _from_gguf(model, common) | {
        **experts_described(model),
        "num_dense_layers": dense,
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in model.tensors,
        # As llama.cpp has it; the file does not say.
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


_PERIOD = 4
"""Of layers without a list of kinds: the third of four attends to all positions, the first one, but for that of the
model, to those of a window."""


def layers_of(config: dict[str, Any]) -> ShortConvolution:
    """The layers of a model. Raises ModelFilesError or UnsupportedArchitecture naming a field and its value."""
    taps = size(config, "conv_L_cache", 7, least=2)
    switch(config, "conv_bias", False)
    names = config.get("layer_types")
    if names is None:
        names = [_kind(layer) for layer in range(config["num_hidden_layers"])]
    kinds = checked_kinds(config, names, {CONVOLUTION: LINEAR, FULL: FULL, SLIDING: SLIDING})
    if SLIDING in kinds and not config.get("sliding_window", 1):
        raise ModelFilesError(
            f"config.json has sliding_window = {config['sliding_window']!s:.60}; a width is needed, as there are "
            f"layers of type {SLIDING}."
        )
    return ShortConvolution(kinds, taps, width=config["hidden_size"])


def _kind(layer: int) -> str:
    if layer % _PERIOD == 2:
        return FULL
    return SLIDING if layer > 0 and layer % _PERIOD == 0 else CONVOLUTION


FAMILIES = [
    Family(
        "lfm2",
        {**_ATTENTION, **_CONVOLUTION, **_FEED_FORWARD},
        _FIELDS,
        aliases={"tie_word_embeddings": "tie_embedding"},
        norms=("operator_norm", None, "ffn_norm", None),
        head_norms="each_head",
        feed_forward_width=feed_forward_width,
        recurrent=short_convolutions_of,
        native_names=_LFM2_NATIVE_NAMES,
        gguf=(Gguf("lfm2", _from_gguf, _GGUF_NAMES, outer=_OUTER_NAMES),),
    ),
    Family(
        "lfm2_moe",
        {**_ATTENTION, **_CONVOLUTION, **_FEED_FORWARD, "feed_forward.experts": "experts"},
        (
            *(*_FIELDS, "intermediate_size"),
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_dense_layers"),
            *("use_expert_bias", "norm_topk_prob", "routed_scaling_factor"),
        ),
        aliases={"tie_word_embeddings": "tie_embedding"},
        norms=("operator_norm", None, "ffn_norm", None),
        head_norms="each_head",
        recurrent=short_convolutions_of,
        experts=Experts(
            (
                "feed_forward.experts.{}.w1.weight",
                "feed_forward.experts.{}.w3.weight",
                "feed_forward.experts.{}.w2.weight",
            ),
            layers=lambda fields, layer: layer >= fields["num_dense_layers"],
            sigmoid_scores=True,
            correction="mixture",
            correction_switch="use_expert_bias",
            least_sum=1e-6,
        ),
        gguf=(Gguf("lfm2moe", _moe_from_gguf, _MOE_NAMES, outer=_OUTER_NAMES),),
        native_names=(
            *_LFM2_NATIVE_NAMES,
            (".mlp.experts", ".feed_forward.experts"),
            (".mlp.gate.", ".feed_forward.gate."),
            (".mlp.e_score_correction_bias", ".feed_forward.expert_bias"),
        ),
    ),
    Family(
        "lfm3",
        {**ATTENTION, "self_attn.g_proj": "colwise", **_CONVOLUTION, **_FEED_FORWARD},
        (
            *(*_FIELDS, "intermediate_size", "attention_bias"),
            *("sliding_window", "use_sandwich_norm", "use_attention_gate"),
        ),
        aliases={"norm_eps": "rms_norm_eps"},
        norms=("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
        after_norm_switch="use_sandwich_norm",
        head_norms="each_head",
        head_gates="use_attention_gate",
        rope_by_kind={FULL: None, SLIDING: None},
        rope_types=BATCHABLE_ROPE | {"proportional"},
        recurrent=layers_of,
        stored_names=((".self_attn.g_proj.", ".self_attn.gate_proj."),),
        native_names=_NATIVE_NAMES,
    ),
]
