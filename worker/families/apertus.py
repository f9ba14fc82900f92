from __future__ import annotations

from typing import Any

from worker.families.family import Family
from worker.families.gguf import LAYER_NAMES, Gguf, Metadata, has_query_bias
from worker.families.parts import ATTENTION, UNGATED_FEED_FORWARD, WITH_BIAS


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "xielu", "attention_bias": has_query_bias(model)}


_GGUF_NAMES = {
    **{name: stored for name, stored in LAYER_NAMES.items() if "norm" not in name and "gate" not in name},
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "attention_layernorm": "attn_norm",
    "feedforward_layernorm": "ffn_norm",
}
_LEARNED = {f"mlp.act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}

FAMILIES = [
    Family(
        "apertus",
        {**ATTENTION, **UNGATED_FEED_FORWARD},
        WITH_BIAS,
        norms=("attention_layernorm", None, "feedforward_layernorm", None),
        head_norms="each_head",
        activations={"xielu": "xielu"},
        gguf=(Gguf("apertus", _from_gguf, _GGUF_NAMES, numbers=_LEARNED),),
    )
]
