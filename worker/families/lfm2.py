from typing import Any

from worker.families.family import Experts, Family
from worker.families.gguf import Gguf, Metadata
from worker.families.parts import QUERY_KEY_VALUE
from worker.families.recurrence import CONVOLUTION, FULL, feed_forward_width, short_convolutions_of
from worker.families.roles import Roles

_CONVOLUTION: Roles = {"conv.in_proj": "regions", "conv.conv": "colwise", "conv.out_proj": "rowwise"}
_FEED_FORWARD: Roles = {"feed_forward.w1": "colwise", "feed_forward.w3": "colwise", "feed_forward.w2": "rowwise"}

_ATTENTION: Roles = {**QUERY_KEY_VALUE, "self_attn.out_proj": "rowwise"}
_NATIVE_NAMES = (
    (".mlp.gate_proj", ".feed_forward.w1"),
    (".mlp.up_proj", ".feed_forward.w3"),
    (".mlp.down_proj", ".feed_forward.w2"),
    (".self_attn.o_proj", ".self_attn.out_proj"),
    (".self_attn.q_norm", ".self_attn.q_layernorm"),
    (".self_attn.k_norm", ".self_attn.k_layernorm"),
    ("model.norm.", "model.embedding_norm."),
)

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
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_MOE_NAMES = _GGUF_NAMES | {
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.experts.w1": "ffn_gate_exps",
    "feed_forward.experts.w3": "ffn_up_exps",
    "feed_forward.experts.w2": "ffn_down_exps",
    "feed_forward.expert_bias": "exp_probs_b.bias",
}
_OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm", "lm_head": "output"}


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    name = model.architecture
    heads = model.array(f"{name}.attention.head_count_kv").numbers()[: common["num_hidden_layers"]]
    return {
        "norm_eps": common["rms_norm_eps"],
        "layer_types": [FULL if one else CONVOLUTION for one in heads],
        "conv_L_cache": model.whole(f"{name}.shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
    }


def _moe_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    dense = model.whole("lfm2moe.leading_dense_block_count", 0, least=0)
    return _from_gguf(model, common) | {
        "num_experts": model.whole("lfm2moe.expert_count"),
        "num_experts_per_tok": model.whole("lfm2moe.expert_used_count"),
        "moe_intermediate_size": model.whole("lfm2moe.expert_feed_forward_length"),
        "num_dense_layers": dense,
        "use_expert_bias": f"blk.{dense}.exp_probs_b.bias" in model.tensors,
        # As llama.cpp has it; the file does not say.
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
    }


FAMILIES = [
    Family(
        "lfm2",
        {**_ATTENTION, **_CONVOLUTION, **_FEED_FORWARD},
        ("norm_eps", "tie_word_embeddings", "head_dim"),
        aliases={"tie_word_embeddings": "tie_embedding"},
        norms=("operator_norm", None, "ffn_norm", None),
        head_norms="each_head",
        feed_forward_width=feed_forward_width,
        recurrent=short_convolutions_of,
        native_names=_NATIVE_NAMES,
        gguf=(Gguf("lfm2", _from_gguf, _GGUF_NAMES, outer=_OUTER_NAMES),),
    ),
    Family(
        "lfm2_moe",
        {**_ATTENTION, **_CONVOLUTION, **_FEED_FORWARD, "feed_forward.experts": "experts"},
        (
            *("norm_eps", "tie_word_embeddings", "head_dim", "intermediate_size"),
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
            *_NATIVE_NAMES,
            (".mlp.experts", ".feed_forward.experts"),
            (".mlp.gate.", ".feed_forward.gate."),
            (".mlp.e_score_correction_bias", ".feed_forward.expert_bias"),
        ),
    ),
]
