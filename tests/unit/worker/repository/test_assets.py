"""Assets for the API are read from the model's folder: those that a leader publishes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from api.chat.template import PlainTemplate
from control.errors import ModelFilesAway, ModelFilesError
from control.messages import Assignment, ModelSpec
from ops.demo import MODEL_DIR
from worker.repository import assets, preparation
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


DEFAULT = "\n{% for m in messages %}\n{{ m.content }}{% endfor %}!\n"
TOOL_USE = "{%- set n = tools | length %}\n  {% if n %}\nuse {{ n }}\n{% endif %}\n\n"


@pytest.mark.parametrize("place", ["list", "folder"])
@pytest.mark.parametrize("tools", [None, [{"type": "function"}]])
def test_a_template_for_tools_is_chosen_as_transformers_does(tmp_path: Path, place: str, tools: Any) -> None:
    """It is rendered where there are tools, to the last line break, and the default one elsewhere."""
    config: dict[str, Any] = {}
    if place == "list":
        config["chat_template"] = [
            {"name": "default", "template": DEFAULT},
            {"name": "tool_use", "template": TOOL_USE},
            {"name": "rag", "template": "no"},
        ]
    else:
        (tmp_path / "chat_template.jinja").write_text(DEFAULT)
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates/tool_use.jinja").write_text(TOOL_USE)
    joined = read_assets(files(tmp_path, tokenizer_config=config), None).chat_template
    assert joined is not None
    messages = [{"role": "user", "content": "Hello"}]
    chosen = TOOL_USE if tools else DEFAULT
    [expected], _ = render_jinja_template([messages], tools=tools, chat_template=chosen)
    assert PlainTemplate(joined).render({"messages": messages, "tools": tools}) == expected


@pytest.mark.parametrize(
    "template",
    [1, True, {"default": "x"}, [1], [[]], [{"name": "default"}], [{"template": "x"}], [{"name": 1}]],
    ids=str,
)
def test_a_template_that_is_no_text_is_refused(tmp_path: Path, template: Any) -> None:
    """Neither a text nor a list of named ones."""
    with pytest.raises(ModelFilesError, match=r"chat_template = .*; a text is needed, or a list of objects"):
        read_assets(files(tmp_path, tokenizer_config={"chat_template": template}), None)


def test_a_template_in_other_bytes_is_refused(tmp_path: Path) -> None:
    """A file that is not UTF-8."""
    read = files(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelFilesError, match=r"chat_template\.jinja is no text in UTF-8"):
        read_assets(read, None)


def test_a_tokenizer_in_other_bytes_is_refused(tmp_path: Path) -> None:
    read = files(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": {"type": "\xff"}}')
    for read_it in (lambda: read_assets(read, None), lambda: assets.check_tokenizer(read)):
        with pytest.raises(ModelFilesError, match=r"tokenizer\.json.* is no text in UTF-8"):
            read_it()


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


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 60}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({"decoder": GROWING}), "decoder makes up to 60 characters of one"),
        ('{"model": [', "it can't be read"),
        ("\udc80", "it can't be read"),
        (" " * 200, "it has 200 bytes; at most 100 are read"),
    ],
)
def test_a_tokenizer_that_no_api_would_use_is_refused_before_a_rank_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    """By the agent's validation, with file, step and remedy; another try would not help. The control: as published."""
    shutil.copytree(MODEL_DIR, folder := tmp_path / "model")
    spec = ModelSpec(name="m", source=str(folder), devices=["cpu"])
    assignment = Assignment(spec=spec, replica="r0", devices=["cpu"], ranks=[0])
    assert preparation.check(assignment) == folder
    (folder / "tokenizer.json").write_text(text, errors="surrogateescape")
    if len(text) == 200:
        monkeypatch.setattr(assets, "MOST_TOKENIZER_BYTES", 100)
    with pytest.raises(ModelFilesError, match=f"tokenizer.json can't be used to decode answers: .*{says}") as caught:
        preparation.check(assignment)
    assert "save_pretrained" in str(caught.value) and not isinstance(caught.value, ModelFilesAway)
