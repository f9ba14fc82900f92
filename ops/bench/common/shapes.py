"""Shapes of models for measuring, by name: fields of config.json, of a qwen3 unless `model_type` says otherwise."""

from __future__ import annotations

from typing import Any

# The layers of google/gemma-3-270m, with a smaller vocabulary so that the layers are what shows.
_SMALL: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}

# Four fifths of the weights that a token meets are those of four experts of 512.
_MIXED: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}

# The layers of Qwen/Qwen3.5-0.8B, with a smaller vocabulary so that the layers are what shows.
_RECURRENT: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    # Small enough that the engine's own overhead is what shows.
    "tiny": {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 16_384,
        "tie_word_embeddings": True,
    },
    # The shape of Qwen/Qwen3-0.6B: reading its weights is what shows.
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
    },
    "gemma3-small": _SMALL | {"model_type": "gemma3_text", "query_pre_attn_scalar": 256, "sliding_window": 512},
    "qwen3-small": _SMALL,
    "qwen3-moe-small": _MIXED
    | {
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    # A dense model that reads as many bytes a token as qwen3-moe-small.
    "qwen3-moe-dense": _MIXED,
    "qwen3.5-0.8b": _RECURRENT
    | {
        "model_type": "qwen3_5_text",
        "intermediate_size": 3584,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
    },
    # Layers of both kinds of qwen3.5, narrow and few.
    "qwen3.5-small": _RECURRENT
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 512,
        "num_hidden_layers": 12,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
    },
    # A model of attention with as many weights in its products as qwen3.5-0.8b.
    "qwen3.5-0.8b-dense": _RECURRENT
    | {
        "intermediate_size": 3680,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    # The shape of Qwen/Qwen3-8B: for GPUs.
    "qwen3-8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": False,
    },
}
