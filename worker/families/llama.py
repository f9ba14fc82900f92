from __future__ import annotations

from typing import Any

from worker.families.family import Family
from worker.families.gguf import LAYER_NAMES, Gguf, Metadata
from worker.families.parts import DENSE, WITH_BIASES


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
    }


FAMILIES = [
    Family("llama", DENSE, WITH_BIASES, gguf=(Gguf("llama", _from_gguf, LAYER_NAMES, permuted=True),)),
]
