from typing import Any

from worker.families.family import Family
from worker.families.gguf import LAYER_NAMES, Gguf, Metadata, biases_described
from worker.families.parts import ATTENTION

_GGUF_NAMES = {
    **{module: name for module, name in LAYER_NAMES.items() if not module.startswith("mlp.")},
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def _from_gguf(model: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    # Files have no window: llama.cpp lets every layer attend to all positions.
    biases = biases_described(model)
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": common["rms_norm_eps"],
        "use_bias": biases["attention_bias"],
        "sliding_window": None,
        **biases,
    }


FAMILIES = [
    Family(
        "starcoder2",
        {**ATTENTION, "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"},
        (
            *("norm_epsilon", "tie_word_embeddings", "head_dim", "intermediate_size", "hidden_act"),
            *("use_bias", "sliding_window"),
        ),
        norm_kind="layer_with_bias",
        gguf=(Gguf("starcoder2", _from_gguf, _GGUF_NAMES),),
        native_names=((".mlp.up_proj", ".mlp.c_fc"), (".mlp.down_proj", ".mlp.c_proj")),
    )
]
