"""config.json of a GGUF model, from its metadata.

Keys are llama.cpp's (github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import math
import struct
from typing import Any

from control.errors import ModelFilesError, UnsupportedArchitecture
from worker.weights.gguf import GgufModel, architecture_of


def configuration(model: GgufModel) -> dict[str, Any]:
    """config.json as transformers would have it. Raises UnsupportedArchitecture or ModelFilesError."""
    name = model.architecture
    family, kind = architecture_of(model)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise model.wrong("token_embd.weight", embedding and embedding.shape, "a matrix is needed")
    if model.whole(f"{name}.expert_count", 0, least=0) and family.experts is None:
        raise UnsupportedArchitecture(f"{model.files[0]}: {name} with experts is not supported from GGUF files.")
    hidden, heads = model.whole(f"{name}.embedding_length"), model.whole(f"{name}.attention.head_count")
    width = model.whole(f"{name}.attention.key_length", hidden // heads)
    for key, what in ((f"{name}.attention.value_length", "values"), (f"{name}.rope.dimension_count", "rotated parts")):
        partial = what == "rotated parts" and (family.recurrent is not None or kind.partial)
        if (other := model.whole(key, width)) != width and not partial:
            raise UnsupportedArchitecture(f"{model.files[0]}: heads are {width} wide and their {what} {other} ({key}).")
    common = {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": _feed_forward_length(model),
        "num_hidden_layers": model.whole(f"{name}.block_count") - prediction_layers(model),
        "num_attention_heads": heads,
        "num_key_value_heads": model.whole(f"{name}.attention.head_count_kv", heads),
        "head_dim": width,
        "rms_norm_eps": model.real(f"{name}.attention.layer_norm_{'rms_' if family.norm_kind == 'rms' else ''}epsilon"),
        "max_position_embeddings": model.whole(f"{name}.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_parameters": _rotary_parameters(model, width),
        "dtype": "bfloat16",
        "bos_token_id": model.whole("tokenizer.ggml.bos_token_id", None, least=0),
        "eos_token_id": model.whole("tokenizer.ggml.eos_token_id", None, least=0),
        "pad_token_id": None,
    }
    return common | kind.config(model, common)


def prediction_layers(model: GgufModel) -> int:
    """Layers behind the last one that predict further tokens, which are not read; 0 for an architecture without."""
    if architecture_of(model)[0].recurrent is None:
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


FACTORS = "rope_freqs.weight"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The constants of all Llama 3.1 to 3.3 models. A file has only the factors that follow from them."""
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Parameters of yarn that a file may have, with their defaults."""
TOLERANCE = 1e-4
_DEFAULT_THETA = 10000.0


def _rotary_parameters(model: GgufModel, width: int) -> dict[str, Any]:
    """`rope_parameters` of heads that are `width` wide. Raises UnsupportedArchitecture for a scaling that is none of
    transformers', ModelFilesError for a damaged one."""
    name = model.architecture
    base = {"rope_theta": model.real(f"{name}.rope.freq_base", _DEFAULT_THETA)}
    if FACTORS in model.tensors:
        return base | _llama3(model, base["rope_theta"], width)
    kind = model.text(f"{name}.rope.scaling.type", "none")
    if kind == "none" and f"{name}.rope.scale_linear" in model.fields:  # files from before there were types
        return base | {"rope_type": "linear", "factor": model.real(f"{name}.rope.scale_linear")}
    if kind == "none":
        return base | {"rope_type": "default"}
    factor = model.real(f"{name}.rope.scaling.factor")
    if kind == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    prefix = f"{name}.rope.scaling.yarn_"
    if kind == "yarn" and not {key for key in model.fields if key.startswith(prefix)} - {prefix + one for one in BETAS}:
        original = model.whole(f"{name}.rope.scaling.original_context_length")
        betas = {one: model.real(prefix + one, default) for one, default in BETAS.items()}
        return base | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    raise UnsupportedArchitecture(
        f"{model.files[0]}: {name}.rope.scaling.type is {kind[:40]!r}, or has parameters that are not supported. "
        "Use a file with none, linear or plain yarn."
    )


def _llama3(model: GgufModel, theta: float, width: int) -> dict[str, Any]:
    """The factors' largest is the scaling's; the others must follow from it."""
    stored = model.tensors[FACTORS]
    if stored.type.name != "f32" or stored.shape != (width // 2,):
        raise ModelFilesError(f"{stored.path}: {FACTORS} is {stored.type.name} of shape {stored.shape}.")
    with stored.path.open("rb") as file:
        file.seek(stored.start)
        factors = struct.unpack(f"<{width // 2}f", file.read(stored.bytes))
    factor = max(factors)
    expected = [_factor(theta ** (2 * index / width), factor) for index in range(width // 2)]
    pairs = zip(factors, expected, strict=True)
    if not all(math.isclose(one, other, rel_tol=TOLERANCE) for one, other in pairs):
        raise UnsupportedArchitecture(
            f"{stored.path}: the factors in {FACTORS} are not Llama 3's, and no others are supported."
        )
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _factor(period: float, factor: float) -> float:
    """By how much the frequency 1 / `period` is divided, as llama.cpp's converter computes it."""
    low, high, original = (
        LLAMA3["low_freq_factor"],
        LLAMA3["high_freq_factor"],
        LLAMA3["original_max_position_embeddings"],
    )
    wavelength = 2 * math.pi * period
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
