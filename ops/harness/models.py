"""Random models of a named shape: speed depends on the shape, not on what the weights say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from control.quantization import BLOCK_QUANTS
from ops.harness import alphabet
from worker.weights.formats import BLOCK_FORMATS

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
    # Fields of config.json, of a qwen3 unless `model_type` says otherwise.
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

BLOCKS = {quant: BLOCK_FORMATS[name] for quant, name in BLOCK_QUANTS.items() if name.replace("_k", "k") == quant}
"""Formats of ggml that Furrow's --quant and llama.cpp's files both have."""


def build(shape: str, folder: Path, dtype: str) -> Path:
    """Save a random model of the shape in `folder`, the same one each time, so that it can be served. Returns `folder`.

    Its tokens are single characters. Greedy sampling never meets a special one, so that no answer ends early: their
    logits are zero, and the largest of thousands of random ones is not.
    """
    import torch  # only here: most benchmarks that name a shape don't make one
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make: Any = CONFIG_MAPPING[SHAPES[shape].get("model_type", "qwen3")]
    config = make(
        initializer_range=0.05,
        bos_token_id=alphabet.BOS,
        eos_token_id=alphabet.EOS,
        pad_token_id=None,
        **{name: value for name, value in SHAPES[shape].items() if name != "model_type"},
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        model.get_output_embeddings().weight[: len(alphabet.SPECIAL)] = 0
    model.save_pretrained(folder, max_shard_size="1GB")  # smaller files need less memory while they are written
    alphabet.write_tokenizer(folder, config.vocab_size)
    return folder


class Models:
    """One shape's files below `folder`, in both forms that engines read; those that are there already are taken."""

    def __init__(self, shape: str, folder: Path, dtype: str = "float32") -> None:
        self._shape = shape
        self._dtype = dtype
        self._folder = folder / f"{shape}-{dtype}"

    def checkpoint(self) -> Path:
        """The folder as transformers keeps a model; made where it is not there, or is of another shape."""
        stamp = self._folder / "shape.json"
        if not stamp.exists() or json.loads(stamp.read_text()) != SHAPES[self._shape]:
            for file in self._folder.glob("*"):
                file.unlink()
            self._folder.mkdir(parents=True, exist_ok=True)
            build(self._shape, self._folder, self._dtype)
            stamp.write_text(json.dumps(SHAPES[self._shape]))
        return self._folder

    def gguf(self, weights: str) -> Path:
        """The same weights for llama.cpp. Raises SettingsError for a kind that is not written."""
        from ops.harness.gguf import convert

        file = self.checkpoint() / f"{weights}.gguf"
        return file if file.exists() else convert(self._folder, file, weights)
