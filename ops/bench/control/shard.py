"""The command with which a leader has a folder's model loaded, for loops that have no leader."""

from __future__ import annotations

from pathlib import Path

from control.commands import LoadDenseShard


def load_command(
    folder: Path, model_id: str, kv_tokens: int, dtype: str = "float32", quant: str | None = None
) -> LoadDenseShard:
    """The first one of epoch 1."""
    return LoadDenseShard(
        epoch=1,
        seq=1,
        model_id=model_id,
        config_json=(folder / "config.json").read_text(),
        safetensors_paths=sorted(map(str, folder.glob("*.safetensors"))),
        dtype=dtype,
        quant=quant,
        kv_tokens=kv_tokens,
    )
