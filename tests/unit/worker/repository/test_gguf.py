"""GGUF is not served yet, and says so wherever it is met."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from control.errors import ModelFilesError
from worker.repository.files import inspect
from worker.repository.source import resolve


@pytest.mark.parametrize("config", [None, '{"model_type": "llama"}'])
def test_a_folder_of_gguf_files_is_refused_by_name(tmp_path: Path, config: str | None) -> None:
    """With or without a config.json the message names the files and what to use instead."""
    (tmp_path / "model-Q4_K_M.GGUF").write_bytes(b"GGUF")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelFilesError, match=r"GGUF weights \(model-Q4_K_M\.GGUF\), which are not supported"):
        inspect(tmp_path)


def test_a_gguf_file_beside_safetensors_does_no_harm(tmp_path: Path) -> None:
    """A folder that has both is served from what can be read."""
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(8)}, tmp_path / "model.safetensors")
    assert [path.name for path in inspect(tmp_path).weights] == ["model.safetensors"]


def test_a_gguf_file_as_source_is_refused(tmp_path: Path) -> None:
    """The file itself is neither taken for a missing folder nor looked for on the hub."""
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for source in (str(file), "model.gguf"):
        with pytest.raises(ModelFilesError, match="is a GGUF file"):
            resolve(source)
