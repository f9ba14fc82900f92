"""config.json of a GGUF model, from its metadata.

Keys are llama.cpp's (github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import math
from typing import Any

from control.errors import UnsupportedArchitecture
from worker.families.gguf import FACTORS, Gguf
from worker.weights.gguf import Array, GgufModel, architecture_of


def configuration(model: GgufModel) -> dict[str, Any]:
    """config.json as transformers would have it. Raises UnsupportedArchitecture or ModelFilesError."""
    name = model.architecture
    family, kind = architecture_of(model)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise model.wrong("token_embd.weight", embedding and embedding.shape, "a matrix is needed")
    if model.whole(f"{name}.expert_count", 0, least=0) and family.experts is None:
        raise UnsupportedArchitecture(f"{model.files[0]}: {name} with experts is not supported from GGUF files.")
    hidden = model.whole(f"{name}.embedding_length")
    heads = model.whole(f"{name}.attention.head_count")
    width = model.whole(f"{name}.attention.key_length", hidden // heads)
    for key, part in ((f"{name}.attention.value_length", "values"), (f"{name}.rope.dimension_count", "rotated parts")):
        partial = (part == "rotated parts" and (family.recurrent is not None or kind.partial)) or family.latent
        if (stored_width := model.whole(key, width)) != width and not partial:
            raise UnsupportedArchitecture(
                f"{model.files[0]}: heads are {width} wide and their {part} {stored_width} ({key})."
            )
    common = {
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": _feed_forward_length(model, kind),
        "num_hidden_layers": model.whole(f"{name}.block_count") - prediction_layers(model),
        "num_attention_heads": heads,
        "num_key_value_heads": _key_value_heads(model, heads, kind),
        "head_dim": width,
        "rms_norm_eps": _epsilon(model, family.norm_kind == "rms"),
        "max_position_embeddings": model.whole(f"{name}.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in model.tensors,
        "rope_parameters": _rotary_parameters(model, width, kind),
        "dtype": "bfloat16",
        "bos_token_id": model.whole("tokenizer.ggml.bos_token_id", None, least=0),
        "eos_token_id": model.whole("tokenizer.ggml.eos_token_id", None, least=0),
        "pad_token_id": None,
    }
    return common | kind.config(model, common)


def _epsilon(model: GgufModel, is_rms: bool) -> float:
    """Of norms. Files of nemotron_h, whose norms are RMS norms, have it under the other name."""
    prefix = f"{model.architecture}.attention.layer_norm_"
    key = f"{prefix}rms_epsilon" if is_rms else f"{prefix}epsilon"
    return model.real(key if key in model.fields or not is_rms else f"{prefix}epsilon")


def _key_value_heads(model: GgufModel, heads: int, kind: Gguf) -> int:
    """Those of the layers that attend; recurrent ones have 0 of them in a list."""
    key = f"{model.architecture}.attention.head_count_kv"
    if kind.layers_differ:
        return model.numbers(key, heads)[0]
    if architecture_of(model)[0].recurrent is None or not isinstance(model.fields.get(key), Array):
        return model.whole(key, heads)
    different = set(model.array(key).numbers()) - {0}
    if len(different) != 1 or not isinstance(count := different.pop(), int) or count < 1:
        raise model.wrong(key, sorted(different), "one number of heads, and 0 for layers without, is needed")
    return count


def prediction_layers(model: GgufModel) -> int:
    """Layers behind the last one that predict further tokens, which are not read; 0 for an architecture without."""
    key = f"{model.architecture}.nextn_predict_layers"
    layers = model.whole(f"{model.architecture}.block_count")
    if (count := model.whole(key, 0, least=0)) >= layers:
        raise model.wrong(key, count, f"less than the number of layers, {layers}, is needed")
    return count


def _feed_forward_length(model: GgufModel, kind: Gguf) -> int:
    """The width of a feed-forward network; of experts where there is no other."""
    key = f"{model.architecture}.feed_forward_length"
    if kind.layers_differ and key in model.fields:
        return model.numbers(key, 0)[0]
    of_experts = f"{model.architecture}.expert_feed_forward_length"
    if isinstance(model.fields.get(key), Array):  # 0 for layers without
        widths = set(model.numbers(key, 0)) - {0}
        if len(widths) == 1:
            return widths.pop()
        if not widths and of_experts in model.fields:
            return model.whole(of_experts)
    return model.whole(key if key in model.fields or of_experts not in model.fields else of_experts)


# The frequency factors of all models with Llama 3's embedding. A file has what follows from them and the length.
LOW = 1.0
HIGH = 4.0
USUAL_LENGTH = 8192
"""The original length of Llama 3.1 to 3.3."""
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Parameters of yarn that a file may have, with their defaults."""
TOLERANCE = 1e-4
_DEFAULT_THETA = 10000.0


def _rotary_parameters(model: GgufModel, width: int, kind: Gguf) -> dict[str, Any]:
    """`rope_parameters` of heads that are `width` wide. Raises UnsupportedArchitecture for a scaling that is none of
    transformers', ModelFilesError for a damaged one."""
    name = model.architecture
    base = {"rope_theta": model.real(f"{name}.rope.freq_base", _DEFAULT_THETA)}
    if FACTORS in model.tensors and not kind.layers_differ:
        return base | _llama3(model, base["rope_theta"], width)
    scaling = model.text(f"{name}.rope.scaling.type", "none")
    if scaling == "none" and f"{name}.rope.scale_linear" in model.fields:  # files from before there were types
        return base | {"rope_type": "linear", "factor": model.real(f"{name}.rope.scale_linear")}
    if scaling == "none":
        return base | {"rope_type": "default"}
    factor = model.real(f"{name}.rope.scaling.factor")
    if scaling == "linear":
        return base | {"rope_type": "linear", "factor": factor}
    prefix = f"{name}.rope.scaling.yarn_"
    read = {prefix + beta for beta in (*BETAS, *(("log_multiplier",) if kind.yarn_logarithm else ()))}
    if scaling == "yarn" and not {key for key in model.fields if key.startswith(prefix)} - read:
        original = model.whole(f"{name}.rope.scaling.original_context_length")
        betas = {beta: model.real(prefix + beta, default) for beta, default in BETAS.items()}
        return base | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    raise UnsupportedArchitecture(
        f"{model.files[0]}: {name}.rope.scaling.type is {scaling[:40]!r}, or has parameters that are not supported. "
        "Use a file with none, linear or plain yarn."
    )


def _llama3(model: GgufModel, theta: float, width: int) -> dict[str, Any]:
    """The factors' largest is the scaling's; the others must follow from it and from one length."""
    stored = model.tensors[FACTORS]
    factors = model.factors(width)
    factor = max(factors)
    periods = [theta ** (2 * index / width) for index in range(width // 2)]
    original, high = _original_length(factors, periods, factor), HIGH
    expected = [_factor(period, factor, original) for period in periods]
    pairs = zip(factors, expected, strict=True)
    if not all(math.isclose(actual, expected, rel_tol=TOLERANCE) for actual, expected in pairs):
        original, high = _length_of_step(factors, periods, factor), LOW
    if original is None:
        raise UnsupportedArchitecture(
            f"{stored.path}: the factors in {FACTORS} are not Llama 3's, and no others are supported."
        )
    lengths = {"low_freq_factor": LOW, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **lengths}


def _original_length(factors: tuple[float, ...], periods: list[float], factor: float) -> int:
    """The original length from which the factors follow. It shows in those between 1 and the largest; where there is
    none, any length between the frequencies that are scaled and those that are not gives the same."""
    for divisor, period in zip(factors, periods, strict=True):
        if 1 + TOLERANCE < divisor < factor * (1 - TOLERANCE):
            smooth = (1 / divisor - 1 / factor) / (1 - 1 / factor)
            return max(1, round(2 * math.pi * period * (smooth * (HIGH - LOW) + LOW)))
    unscaled = [period for divisor, period in zip(factors, periods, strict=True) if divisor <= 1 + TOLERANCE]
    least = 2 * math.pi * max(unscaled, default=0.0) * HIGH
    scaled = [period for divisor, period in zip(factors, periods, strict=True) if divisor > 1 + TOLERANCE]
    most = 2 * math.pi * min(scaled, default=math.inf) * LOW
    return USUAL_LENGTH if least < USUAL_LENGTH < most else math.ceil(least) + 1


def _length_of_step(factors: tuple[float, ...], periods: list[float], factor: float) -> int | None:
    """The original length where all frequencies up to one are as they are, and all others divided by the factor, as of
    Llama 4, whose two borders are one; None for other factors."""
    stays = [math.isclose(value, 1.0, rel_tol=TOLERANCE) for value in factors]
    divided = [math.isclose(value, factor, rel_tol=TOLERANCE) for value in factors]
    count = sum(stays)
    if not 0 < count < len(factors) or not all(stays[:count]) or not all(divided[count:]):
        return None
    least, most = (2 * math.pi * period for period in periods[count - 1 : count + 1])
    length = USUAL_LENGTH if least < USUAL_LENGTH < most else math.ceil(least)
    return length if least < length < most else None


def _factor(period: float, factor: float, original: int) -> float:
    """By how much the frequency 1 / `period` is divided, as llama.cpp's converter computes it."""
    wavelength = 2 * math.pi * period
    if wavelength < original / HIGH:
        return 1.0
    if wavelength > original / LOW:
        return factor
    smooth = (original / wavelength - LOW) / (HIGH - LOW)
    return 1 / ((1 - smooth) / factor + smooth)
