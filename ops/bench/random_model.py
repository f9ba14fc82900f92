"""Random models of a named shape: speed depends on the shape, not on what the weights say."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from ops.bench.shapes import SHAPES
from ops.demo import MODEL_DIR

TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def build(shape: str, folder: Path, dtype: str) -> Path:
    """Save a random model of the shape in `folder`, the same one each time, so that it can be served. Returns `folder`.

    Its tokenizer is the demonstration model's: ids beyond that one's vocabulary are sampled too, and have no text.
    """
    config = Qwen3Config(tie_word_embeddings=True, initializer_range=0.05, **SHAPES[shape])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    for name in TEXT_FILES:
        shutil.copy(MODEL_DIR / name, folder / name)
    return folder
