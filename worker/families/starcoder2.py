from worker.families.family import Family
from worker.families.parts import ATTENTION

FAMILIES = [
    Family(
        "starcoder2",
        {**ATTENTION, "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"},
        (
            *("norm_epsilon", "tie_word_embeddings", "head_dim", "intermediate_size", "hidden_act"),
            *("use_bias", "sliding_window"),
        ),
        norm_kind="layer_with_bias",
        native_names=((".mlp.up_proj", ".mlp.c_fc"), (".mlp.down_proj", ".mlp.c_proj")),
    )
]
