"""Faults of the files beside a GGUF file are told with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from control.errors import ModelFilesError
from tests.gguf_models import Stored, write
from worker.repository.gguf.description import describe
from worker.weights.gguf import GgufModel, read_model

LISTED = [{"name": "default", "template": "listed"}, {"name": "tool_use", "template": "used"}]


def model(folder: Path, template: Any = None, **metadata: Any) -> GgufModel:
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return read_model(write(folder / "a.gguf", metadata, {"a": Stored(0, (8,), bytes(32))}))


def test_the_template_is_found_as_in_a_folder(tmp_path: Path) -> None:
    """One of a list too; the file's own goes before it."""
    assert describe(model(tmp_path, "one")).chat_template == "one"
    assert describe(model(tmp_path, LISTED)).chat_template == "{%+ if tools +%}used{%+ else +%}listed{%+ endif %}"
    assert describe(model(tmp_path, LISTED, **{"tokenizer.chat_template": "own"})).chat_template == "own"
    (tmp_path / "chat_template.jinja").write_text("beside")
    assert describe(model(tmp_path, "one")).chat_template == "beside"


@pytest.mark.parametrize("template", [1, [1], {"default": "x"}], ids=str)
def test_a_template_that_is_no_text_is_refused(template: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"chat_template = .*; a text is needed, or a list of objects"):
        describe(model(tmp_path, template))


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json"])
def test_a_file_in_other_bytes_is_refused(name: str, tmp_path: Path) -> None:
    read = model(tmp_path)
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(ModelFilesError, match=f"{name} is no text in UTF-8"):
        describe(read)


@pytest.mark.parametrize(("ids", "ends"), [(7, [7]), ([5, 6], [5, 6]), (None, [])])
def test_the_ends_are_those_of_the_folder(ids: Any, ends: list[int], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert describe(model(tmp_path)).eos_ids == ends


def test_an_end_that_is_no_id_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(ModelFilesError, match="eos_token_id = "):
        describe(model(tmp_path))
