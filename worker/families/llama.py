"""llama, and types that differ from it by defaults, names of fields or a switch."""

from __future__ import annotations

from typing import Any

from worker.families.family import Family, Fields
from worker.families.gguf import LAYER_NAMES, Gguf, Metadata
from worker.families.parts import ATTENTION, DENSE, GATED, UNGATED_FEED_FORWARD, WINDOWS, WITH_BIAS, WITH_BIASES
from worker.families.recurrence import FULL


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
    }


def _has_rope(fields: Fields, layer: int, kind: str = FULL) -> bool:
    turns = fields["no_rope_layers"]
    return bool(turns[layer]) if turns is not None else (layer + 1) % fields["no_rope_layer_interval"] != 0


FAMILIES = [
    Family("arcee", {**ATTENTION, **UNGATED_FEED_FORWARD}, WITH_BIASES, activations={"relu2": "relu2"}),
    Family("ernie4_5", DENSE, (*GATED, "use_bias"), rope_neighbours=True),
    Family("hunyuan_v1_dense", DENSE, WITH_BIAS, head_norms="each_turned_head"),
    Family("internlm3", DENSE, WITH_BIASES, aliases={"attention_bias": "qkv_bias", "mlp_bias": "bias"}),
    Family("llama", DENSE, WITH_BIASES, gguf=(Gguf("llama", _from_gguf, LAYER_NAMES, permuted=True),)),
    Family("seed_oss", DENSE, (*WITH_BIASES, "attention_out_bias")),
    Family(
        "smollm3",
        DENSE,
        (*WITH_BIASES, *WINDOWS, "use_sliding_window", "no_rope_layers", "no_rope_layer_interval"),
        slides=lambda fields, layer: not _has_rope(fields, layer),
        rotates=_has_rope,
    ),
]
