"""The assets that a leader publishes for the APIs, read from its model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from control.errors import ModelFilesError
from worker.repository.assets import read_assets
from worker.repository.files import ModelFiles

CONFIG = {"model_type": "llama", "vocab_size": 8, "max_position_embeddings": 64, "eos_token_id": 7}


def files(folder: Path, **changes: Any) -> ModelFiles:
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    fields = {"config": CONFIG, "weights": [], "folder": folder, "tokenizer": folder / "tokenizer.json"} | changes
    return ModelFiles(**fields)


def test_the_template_of_a_file_goes_before_the_tokenizer_s(tmp_path: Path) -> None:
    """chat_template.jinja first, then tokenizer_config.json, where a list has one named default."""
    several = [{"name": "rag", "template": "no"}, {"name": "default", "template": "listed"}]
    assert read_assets(files(tmp_path), None).chat_template is None
    assert read_assets(files(tmp_path, tokenizer_config={"chat_template": "inner"}), None).chat_template == "inner"
    assert read_assets(files(tmp_path, tokenizer_config={"chat_template": several}), None).chat_template == "listed"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert read_assets(files(tmp_path, tokenizer_config={"chat_template": "inner"}), None).chat_template == "own"


def test_every_end_of_sequence_id_is_published(tmp_path: Path) -> None:
    """generation_config.json's list goes before the single one of config.json."""
    assert read_assets(files(tmp_path), None).eos_ids == [7]
    assert read_assets(files(tmp_path, generation_config={"eos_token_id": [5, 6]}), None).eos_ids == [5, 6]


def test_the_context_is_the_models_or_what_was_asked(tmp_path: Path) -> None:
    """--max-context shortens; more than the model has never comes this far."""
    assert [read_assets(files(tmp_path), limit).context_length for limit in (None, 32)] == [64, 32]


def test_an_api_gets_the_tokenizer_itself(tmp_path: Path) -> None:
    """An API process has no access to the folder, so the text travels; without a tokenizer nothing is published."""
    assert json.loads(read_assets(files(tmp_path), None).tokenizer_json) == {"version": "1.0"}
    with pytest.raises(ModelFilesError, match="no tokenizer"):
        read_assets(files(tmp_path, tokenizer=None), None)
