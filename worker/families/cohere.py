from typing import Any

from worker.families.family import BEFORE_BOTH, Family
from worker.families.gguf import LAYER_NAMES, Gguf, Metadata, has_query_bias, layers_described
from worker.families.parts import DENSE, SLIDING, WINDOWS, all_but_every_pattern
from worker.families.recurrence import FULL

_FIELDS = (
    *("layer_norm_eps", "tie_word_embeddings", "intermediate_size", "hidden_act", "attention_bias"),
    "logit_scale",
)

_FULL_EVERY = 4


def _common(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "layer_norm_eps": common["rms_norm_eps"],
        "attention_bias": has_query_bias(model),
        "logit_scale": model.real(f"{model.architecture}.logit_scale"),
    }


def _cohere_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return _common(model, common) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in model.tensors}


def _cohere2_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    layers = layers_described(model, common["num_hidden_layers"])
    return _common(model, common) | {
        "sliding_window": model.whole("cohere2.attention.sliding_window"),
        "sliding_window_pattern": _FULL_EVERY,
        "layer_types": [FULL if (layer + 1) % _FULL_EVERY == 0 else SLIDING for layer in layers],
    }


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
        gguf=(Gguf("command-r", _cohere_from_gguf, LAYER_NAMES),),
        rope_neighbours=True,
    ),
    Family(
        "cohere2",
        DENSE,
        (*_FIELDS, "head_dim", *WINDOWS, "sliding_window_pattern"),
        own_defaults={"sliding_window_pattern": _FULL_EVERY},
        gguf=(Gguf("cohere2", _cohere2_from_gguf, LAYER_NAMES),),
        norms=BEFORE_BOTH,
        norm_kind="layer",
        parallel=True,
        slides=all_but_every_pattern,
        rotates=lambda fields, layer, kind: kind == SLIDING and fields["sliding_window"] is not None,
        rope_neighbours=True,
    ),
]
