"""The command with which a leader has a model loaded, for loops that have no leader."""

from __future__ import annotations

import json
from pathlib import Path

from control.commands import LoadDenseShard
from worker.repository.files import inspect, is_gguf


def load_command(
    model: Path, model_id: str, kv_tokens: int, dtype: str = "float32", quant: str | None = None
) -> LoadDenseShard:
    """The first one of epoch 1. `model` is a folder or a GGUF file. Raises ModelFilesError."""
    if is_gguf(model):
        files = inspect(model)
        config = json.dumps(files.config)
        weights = files.weights
    else:
        config = (model / "config.json").read_text()
        weights = sorted(model.glob("*.safetensors"))
    return LoadDenseShard(
        epoch=1,
        seq=1,
        model_id=model_id,
        config_json=config,
        safetensors_paths=[str(path) for path in weights],
        dtype=dtype,
        quant=quant,
        kv_tokens=kv_tokens,
    )
