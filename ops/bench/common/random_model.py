"""Random models of a named shape: speed depends on the shape, not on what the weights say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ops.bench.common import alphabet
from ops.bench.common.shapes import SHAPES

_SHARD = "1GB"
"""Of a file of weights; smaller ones need less memory while they are written."""


def build(shape: str, folder: Path, dtype: str) -> Path:
    """Save a random model of the shape in `folder`, the same one each time, so that it can be served. Returns `folder`.

    Its tokens are single characters. Greedy sampling never meets a special one, so that no answer ends early: their
    logits are zero, and the largest of thousands of random ones is not.
    """
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
    model.save_pretrained(folder, max_shard_size=_SHARD)
    alphabet.write_tokenizer(folder, config.vocab_size)
    return folder
