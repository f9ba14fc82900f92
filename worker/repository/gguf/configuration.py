"""config.json of a GGUF model, from its metadata.

Keys are llama.cpp's (github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

from typing import Any

from control.errors import UnsupportedArchitecture
from worker.families.family import Family
from worker.families.gguf import Gguf
from worker.families.registry import GGUF_ARCHITECTURES
from worker.repository.gguf import rotary
from worker.repository.gguf.model import GgufModel


def configuration(model: GgufModel) -> dict[str, Any]:
    """config.json as transformers would have it. Raises UnsupportedArchitecture or ModelFilesError."""
    name = model.architecture
    family, kind = architecture(model)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise model.wrong("token_embd.weight", embedding and embedding.shape, "a matrix is needed")
    if model.whole(f"{name}.expert_count", 0, least=0) and family.experts is None:
        raise UnsupportedArchitecture(f"{model.files[0]}: {name} with experts is not supported from GGUF files.")
    hidden, heads = model.whole(f"{name}.embedding_length"), model.whole(f"{name}.attention.head_count")
    width = model.whole(f"{name}.attention.key_length", hidden // heads)
    for key, what in ((f"{name}.attention.value_length", "values"), (f"{name}.rope.dimension_count", "rotated parts")):
        if (other := model.whole(key, width)) != width and not (family.recurrent and what == "rotated parts"):
            raise UnsupportedArchitecture(f"{model.files[0]}: heads are {width} wide and their {what} {other} ({key}).")
    common = {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": _feed_forward_length(model),
        "num_hidden_layers": model.whole(f"{name}.block_count") - prediction_layers(model),
        "num_attention_heads": heads,
        "num_key_value_heads": model.whole(f"{name}.attention.head_count_kv", heads),
        "head_dim": width,
        "rms_norm_eps": model.real(f"{name}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": model.whole(f"{name}.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_parameters": rotary.parameters(model, width),
        "dtype": "bfloat16",
        "bos_token_id": model.whole("tokenizer.ggml.bos_token_id", None, least=0),
        "eos_token_id": model.whole("tokenizer.ggml.eos_token_id", None, least=0),
        "pad_token_id": None,
    }
    return common | kind.config(model, common)


def architecture(model: GgufModel) -> tuple[Family, Gguf]:
    """The record of the model's type, and that of its architecture. Raises UnsupportedArchitecture listing what is
    served."""
    name = model.architecture
    if name not in GGUF_ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{model.files[0]}: architecture '{name[:60]}' is not supported from GGUF files. "
            f"Supported: {', '.join(sorted(GGUF_ARCHITECTURES))}."
        )
    return GGUF_ARCHITECTURES[name]


def prediction_layers(model: GgufModel) -> int:
    """Layers behind the last one that predict further tokens, which are not read; 0 for an architecture without."""
    if architecture(model)[0].recurrent is None:
        return 0
    key, layers = f"{model.architecture}.nextn_predict_layers", model.whole(f"{model.architecture}.block_count")
    if (count := model.whole(key, 0, least=0)) >= layers:
        raise model.wrong(key, count, f"less than the number of layers, {layers}, is needed")
    return count


def _feed_forward_length(model: GgufModel) -> int:
    """The width of a feed-forward network; of experts where there is no other."""
    key = f"{model.architecture}.feed_forward_length"
    of_experts = f"{model.architecture}.expert_feed_forward_length"
    return model.whole(key if key in model.fields or of_experts not in model.fields else of_experts)
