"""Shapes of models for measuring, by name."""

from __future__ import annotations

from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    # Small enough that the engine's own overhead is what shows.
    "tiny": {
        "vocab_size": 2048,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
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
    },
}
