from worker.families.family import BEFORE_BOTH, Family
from worker.families.parts import DENSE, SLIDING, WINDOWS, all_but_every_pattern

_FIELDS = (
    *("layer_norm_eps", "tie_word_embeddings", "intermediate_size", "hidden_act", "attention_bias"),
    "logit_scale",
)

FAMILIES = [
    Family(
        "cohere",
        {**DENSE, "self_attn.q_norm": "colwise", "self_attn.k_norm": "colwise"},
        (*_FIELDS, "head_dim", "use_qk_norm"),
        norms=BEFORE_BOTH,
        norm_kind="layer",
        parallel=True,
        head_norms="each_own_head",
        head_norm_switch="use_qk_norm",
        rope_neighbours=True,
    ),
    Family(
        "cohere2",
        DENSE,
        (*_FIELDS, "head_dim", *WINDOWS, "sliding_window_pattern"),
        own_defaults={"sliding_window_pattern": 4},
        norms=BEFORE_BOTH,
        norm_kind="layer",
        parallel=True,
        slides=all_but_every_pattern,
        rotates=lambda fields, layer, kind: kind == SLIDING and fields["sliding_window"] is not None,
        rope_neighbours=True,
    ),
]
