"""Architectures of GGUF files that are served, and their configurations.

Keys are llama.cpp's (github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from control.errors import UnsupportedArchitecture
from worker.formats.gguf_names import (
    EXPERT_LAYER_NAMES,
    GEMMA3_LAYER_NAMES,
    GPT_OSS_LAYER_NAMES,
    HYBRID_LAYER_NAMES,
    LAYER_NAMES,
    OUTER_NAMES,
    QWEN3_NEXT_LAYER_NAMES,
    WHOLE_NAMES,
)
from worker.formats.recurrence import FULL, LINEAR, TILED
from worker.repository.gguf import rotary
from worker.repository.gguf.model import GgufModel

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_GEMMA3_27B_LAYERS = 62
_GEMMA3_PATTERN = 6
"""Every sixth layer of gemma3 attends to all positions."""


@dataclass(frozen=True)
class Architecture:
    """`config` adds what is special of the type. `head_norms`: queries and keys are normalised by head. `permuted`: the
    rows of query and key projections are stored in the order of adjacent pairs. `norm_offset` was added to the weights
    of norms, but for those of recurrent layers. `recurrent`: some layers are recurrent, a part of each head is rotated,
    and layers that predict further tokens may follow."""

    model_type: str
    config: Callable[[GgufModel, dict[str, Any]], dict[str, Any]]
    layer_names: dict[str, str]
    head_norms: bool = False
    experts: bool = False
    permuted: bool = False
    norm_offset: float = 0.0
    recurrent: bool = False


def configuration(model: GgufModel) -> dict[str, Any]:
    """config.json as transformers would have it. Raises UnsupportedArchitecture or ModelFilesError."""
    name, kind = model.architecture, architecture(model)
    embedding = model.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise model.wrong("token_embd.weight", embedding and embedding.shape, "a matrix is needed")
    if model.whole(f"{name}.expert_count", 0, least=0) and not kind.experts:
        raise UnsupportedArchitecture(f"{model.files[0]}: {name} with experts is not supported from GGUF files.")
    hidden, heads = model.whole(f"{name}.embedding_length"), model.whole(f"{name}.attention.head_count")
    width = model.whole(f"{name}.attention.key_length", hidden // heads)
    for key, what in ((f"{name}.attention.value_length", "values"), (f"{name}.rope.dimension_count", "rotated parts")):
        if (other := model.whole(key, width)) != width and not (kind.recurrent and what == "rotated parts"):
            raise UnsupportedArchitecture(f"{model.files[0]}: heads are {width} wide and their {what} {other} ({key}).")
    common = {
        "model_type": kind.model_type,
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


def architecture(model: GgufModel) -> Architecture:
    """The table's row. Raises UnsupportedArchitecture listing what is served."""
    name = model.architecture
    if name not in ARCHITECTURES:
        raise UnsupportedArchitecture(
            f"{model.files[0]}: architecture '{name[:60]}' is not supported from GGUF files. "
            f"Supported: {', '.join(sorted(ARCHITECTURES))}."
        )
    return ARCHITECTURES[name]


def stored_name(kind: Architecture, name: str) -> str | None:
    """The name in the file of transformers' parameter `name`; None if the architecture has none. The experts of a layer
    are one tensor."""
    stem, _, leaf = _EXPERT.sub(".experts.", name).rpartition(".")
    if stem.startswith("model.layers."):
        index, _, rest = stem.removeprefix("model.layers.").partition(".")
        if (whole := WHOLE_NAMES.get(f"{rest}.{leaf}")) is not None:
            return f"blk.{index}.{whole}"
        inner = kind.layer_names.get(rest)
        return None if inner is None else f"blk.{index}.{inner}.{leaf}"
    outer = OUTER_NAMES.get(stem)
    return None if outer is None else f"{outer}.{leaf}"


def prediction_layers(model: GgufModel) -> int:
    """Layers behind the last one that predict further tokens, which are not read; 0 for an architecture without."""
    if not architecture(model).recurrent:
        return 0
    key, layers = f"{model.architecture}.nextn_predict_layers", model.whole(f"{model.architecture}.block_count")
    if (count := model.whole(key, 0, least=0)) >= layers:
        raise model.wrong(key, count, f"less than the number of layers, {layers}, is needed")
    return count


def expert_of(name: str) -> int | None:
    """The number of the expert that transformers' parameter `name` belongs to."""
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def _llama(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in model.tensors,
    }


def _qwen2(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False}


def _qwen3(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": "blk.0.attn_q.bias" in model.tensors,
    }


def _qwen3_moe(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    return _qwen3(model, common) | {
        "num_experts": model.whole("qwen3moe.expert_count"),
        "num_experts_per_tok": model.whole("qwen3moe.expert_used_count"),
        "moe_intermediate_size": model.whole("qwen3moe.expert_feed_forward_length"),
        "norm_topk_prob": True,  # as llama.cpp has it; the file does not say
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma3(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    layers, heads = common["num_hidden_layers"], common["num_attention_heads"]
    # llama.cpp knows the one size whose scale is no head's by its number of layers.
    scalar = common["hidden_size"] // heads if layers == _GEMMA3_27B_LAYERS else common["head_dim"]
    local = {"rope_type": "default", "rope_theta": model.real("gemma3.rope.freq_base_swa", 10000.0)}
    pattern = model.whole("gemma3.attention.sliding_window_pattern", _GEMMA3_PATTERN)
    # As many layers as the file has tensors for, at most: a damaged number must not become a list of that length.
    count = min(layers, len(model.tensors))
    kinds = ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(count)]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": model.whole("gemma3.attention.sliding_window"),
        "layer_types": kinds,
        "rope_parameters": {"full_attention": common["rope_parameters"], "sliding_attention": local},
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": model.real("gemma3.final_logit_softcapping", None),
    }


def _feed_forward_length(model: GgufModel) -> int:
    """The width of a feed-forward network; of experts where there is no other."""
    key = f"{model.architecture}.feed_forward_length"
    of_experts = f"{model.architecture}.expert_feed_forward_length"
    return model.whole(key if key in model.fields or of_experts not in model.fields else of_experts)


def _qwen3_5(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    name, width, layers = model.architecture, common["head_dim"], common["num_hidden_layers"]
    rotated, value_heads = model.whole(f"{name}.rope.dimension_count", width), model.whole(f"{name}.ssm.time_step_rank")
    inner, interval = model.whole(f"{name}.ssm.inner_size"), model.whole(f"{name}.full_attention_interval", 4)
    if inner % value_heads:
        raise model.wrong(f"{name}.ssm.inner_size", inner, f"a multiple of the {value_heads} value heads is needed")
    if rotated > width or rotated % 2:
        raise model.wrong(f"{name}.rope.dimension_count", rotated, f"an even number up to {width} is needed")
    given = f"{name}.attention.recurrent_layers"
    kinds = None
    if given in model.fields:
        kinds = [LINEAR if one else FULL for one in model.array(given).numbers()[:layers]]
    return {
        "hidden_act": "silu",
        "rope_parameters": common["rope_parameters"] | {"partial_rotary_factor": rotated / width},
        "linear_conv_kernel_dim": model.whole(f"{name}.ssm.conv_kernel"),
        "linear_key_head_dim": model.whole(f"{name}.ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_num_key_heads": model.whole(f"{name}.ssm.group_count"),
        "linear_num_value_heads": value_heads,
        TILED: True,
        "full_attention_interval": interval,
        "layer_types": kinds,
    }


def _qwen3_5_moe(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    experts = f"{model.architecture}.expert"
    return _qwen3_5(model, common) | {
        "num_experts": model.whole(f"{experts}_count"),
        "num_experts_per_tok": model.whole(f"{experts}_used_count"),
        "moe_intermediate_size": model.whole(f"{experts}_feed_forward_length"),
        "shared_expert_intermediate_size": model.whole(f"{experts}_shared_feed_forward_length"),
    }


def _qwen3_next(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    # Files hold its projections as Qwen3.5 has them, and the value heads of a key head side by side.
    return _qwen3_5_moe(model, common) | {TILED: False}


def _gpt_oss(model: GgufModel, common: dict[str, Any]) -> dict[str, Any]:
    # As in _gemma3: a damaged number must not become a list of that length.
    count = min(common["num_hidden_layers"], len(model.tensors))
    return {
        "hidden_act": "silu",
        "intermediate_size": model.whole("gpt-oss.expert_feed_forward_length"),
        "num_local_experts": model.whole("gpt-oss.expert_count"),
        "num_experts_per_tok": model.whole("gpt-oss.expert_used_count"),
        "sliding_window": model.whole("gpt-oss.attention.sliding_window"),
        "layer_types": ["full_attention" if layer % 2 else "sliding_attention" for layer in range(count)],
        "attention_bias": True,
        # The files say none of these; they are those of the published models.
        "swiglu_limit": 7.0,
        "rope_parameters": common["rope_parameters"] | {"truncate": False},
    }


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama", _llama, LAYER_NAMES, permuted=True),
    "qwen2": Architecture("qwen2", _qwen2, LAYER_NAMES),
    "qwen3": Architecture("qwen3", _qwen3, LAYER_NAMES, head_norms=True),
    "qwen3moe": Architecture("qwen3_moe", _qwen3_moe, EXPERT_LAYER_NAMES, head_norms=True, experts=True),
    "qwen35": Architecture(
        "qwen3_5_text", _qwen3_5, HYBRID_LAYER_NAMES, head_norms=True, norm_offset=1.0, recurrent=True
    ),
    "qwen35moe": Architecture(
        *("qwen3_5_moe_text", _qwen3_5_moe, HYBRID_LAYER_NAMES),
        head_norms=True,
        experts=True,
        norm_offset=1.0,
        recurrent=True,
    ),
    "qwen3next": Architecture(
        *("qwen3_5_moe_text", _qwen3_next, QWEN3_NEXT_LAYER_NAMES),
        head_norms=True,
        experts=True,
        norm_offset=1.0,
        recurrent=True,
    ),
    "gpt-oss": Architecture("gpt_oss", _gpt_oss, GPT_OSS_LAYER_NAMES, experts=True),
    "gemma3": Architecture("gemma3_text", _gemma3, GEMMA3_LAYER_NAMES, head_norms=True, norm_offset=1.0),
}
