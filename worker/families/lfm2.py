from worker.families.family import Family
from worker.families.parts import QUERY_KEY_VALUE
from worker.families.roles import Roles
from worker.families.short_convolution import feed_forward_width, short_convolutions_of

_CONVOLUTION: Roles = {"conv.in_proj": "regions", "conv.conv": "colwise", "conv.out_proj": "rowwise"}
_FEED_FORWARD: Roles = {"feed_forward.w1": "colwise", "feed_forward.w3": "colwise", "feed_forward.w2": "rowwise"}

FAMILIES = [
    Family(
        "lfm2",
        {**QUERY_KEY_VALUE, "self_attn.out_proj": "rowwise", **_CONVOLUTION, **_FEED_FORWARD},
        ("norm_eps", "tie_word_embeddings", "head_dim"),
        aliases={"tie_word_embeddings": "tie_embedding"},
        norms=("operator_norm", None, "ffn_norm", None),
        head_norms="each_head",
        feed_forward_width=feed_forward_width,
        recurrent=short_convolutions_of,
        native_names=(
            (".mlp.gate_proj", ".feed_forward.w1"),
            (".mlp.up_proj", ".feed_forward.w3"),
            (".mlp.down_proj", ".feed_forward.w2"),
            (".self_attn.o_proj", ".self_attn.out_proj"),
            (".self_attn.q_norm", ".self_attn.q_layernorm"),
            (".self_attn.k_norm", ".self_attn.k_layernorm"),
            ("model.norm.", "model.embedding_norm."),
        ),
    )
]
