from worker.families.family import Family
from worker.families.parts import GATED, PACKED_FEED_FORWARD, QUERY_KEY_VALUE

FAMILIES = [
    Family("phi", {**QUERY_KEY_VALUE, "self_attn.dense": "rowwise", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}),
    Family(
        "phi3",
        {"self_attn.qkv_proj": "query_key_value", "self_attn.o_proj": "rowwise", **PACKED_FEED_FORWARD},
        (*GATED, "sliding_window"),
        longrope_names=frozenset({"su", "yarn"}),
    ),
]
