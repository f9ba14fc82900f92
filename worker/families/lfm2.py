from worker.families.family import Experts, Family
from worker.families.parts import QUERY_KEY_VALUE
from worker.families.roles import Roles
from worker.families.short_convolution import feed_forward_width, short_convolutions_of

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
        native_names=(
            *_NATIVE_NAMES,
            (".mlp.experts", ".feed_forward.experts"),
            (".mlp.gate.", ".feed_forward.gate."),
            (".mlp.e_score_correction_bias", ".feed_forward.expert_bias"),
        ),
    ),
]
