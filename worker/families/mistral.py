from typing import Any

from worker.families.family import Family, TextPart
from worker.families.gguf import LAYER_NAMES, MIXTRAL_LAYER_NAMES, Gguf, Metadata, has_experts, local_experts_described
from worker.families.parts import ATTENTION, DENSE, EXPERTS, GATED, IN_BLOCK_SPARSE_MOE, MIXTRAL_EXPERTS, WINDOWS


def _mixtral_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "sliding_window": None,
        **local_experts_described(model),
    }


def _ministral_from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = common["rope_parameters"]
    every = model.real("mistral3.rope.scaling.yarn_log_multiplier", None)
    if every is not None:
        rope = rope | {"mscale": every, "mscale_all_dim": every}
    growth = model.real("mistral3.attention.temperature_scale", None)
    if growth is not None:
        rope = rope | {"llama_4_scaling_beta": growth}
    return {"hidden_act": "silu", "sliding_window": None, "rope_parameters": rope}


FAMILIES = [
    Family("ministral", DENSE, (*GATED, *WINDOWS)),
    Family(
        "ministral3",
        DENSE,
        (*GATED, "sliding_window"),
        queries_grow=True,
        gguf=(Gguf("mistral3", _ministral_from_gguf, LAYER_NAMES, permuted=True, yarn_logarithm=True),),
    ),
    Family("mistral", DENSE, (*GATED, "sliding_window")),
    Family(
        "mixtral",
        {**ATTENTION, **EXPERTS},
        (*GATED, "sliding_window", "num_local_experts", "num_experts_per_tok"),
        aliases={"num_local_experts": "num_experts"},
        experts=MIXTRAL_EXPERTS,
        stored_names=IN_BLOCK_SPARSE_MOE,
        gguf=(Gguf("llama", _mixtral_from_gguf, MIXTRAL_LAYER_NAMES, when=has_experts, permuted=True),),
    ),
]

TEXT_PARTS = [TextPart("mistral3", None, tied=True)]
