"""A faulty model folder is refused: one fault each."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from control.errors import ModelFilesAway, ModelFilesError
from worker.repository.config_fields import is_tied
from worker.repository.files import ModelFiles, inspect


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that passes."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    save_file({"a": torch.zeros(8)}, tmp_path / "model.safetensors")
    return tmp_path


def test_the_files_of_a_whole_folder_are_found(folder: Path) -> None:
    """Configuration, weights, tokenizer and the optional files are found."""
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')
    files = inspect(folder)
    assert files.config == {"model_type": "llama"}
    assert files.weights == [folder / "model.safetensors"]
    assert files.tokenizer == folder / "tokenizer.json"
    assert files.generation_config == {"eos_token_id": 7}
    assert files.tokenizer_config == {}


def test_a_head_of_its_own_is_not_tied(folder: Path) -> None:
    """Whatever config.json says; without one in the files it counts."""
    (folder / "config.json").write_text('{"model_type": "llama", "tie_word_embeddings": true}')
    assert inspect(folder).config["tie_word_embeddings"]
    save_file({"lm_head.weight": torch.zeros(8)}, folder / "model.safetensors")
    assert not inspect(folder).config["tie_word_embeddings"]


def test_a_head_of_its_own_is_not_tied_by_the_other_name(folder: Path) -> None:
    """transformers' class of lfm2 reads `tie_embedding` first; all that ask are told the same."""
    (folder / "config.json").write_text('{"model_type": "lfm2", "tie_embedding": true}')
    assert is_tied(inspect(folder).config)
    save_file({"lm_head.weight": torch.zeros(8)}, folder / "model.safetensors")
    files = inspect(folder)
    assert files.config == {"model_type": "lfm2", "tie_word_embeddings": False}
    assert not is_tied(files.config)


def test_a_head_that_is_the_embedding_once_more_stays_tied(folder: Path) -> None:
    """To the last byte, in another file too; where config.json does not tie them they are two."""
    embedding = torch.arange(2**19, dtype=torch.float32).reshape(-1, 8)
    head = embedding.clone()
    save_file({"model.embed_tokens.weight": embedding}, folder / "model.safetensors")
    save_file({"lm_head.weight": head}, folder / "other.safetensors")
    index = {"weight_map": {"a": "model.safetensors", "b": "other.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "lfm2", "tie_embedding": true}')
    assert inspect(folder).config == {"model_type": "lfm2", "tie_embedding": True}
    (folder / "config.json").write_text('{"model_type": "lfm2", "tie_embedding": false}')
    assert not is_tied(inspect(folder).config)
    (folder / "config.json").write_text('{"model_type": "lfm2"}')
    assert is_tied(inspect(folder).config)
    for changed in (head.half(), torch.cat([head[:-1], head[:1]])):
        save_file({"lm_head.weight": changed}, folder / "other.safetensors")
        assert not is_tied(inspect(folder).config)


def test_shards_are_unique_and_named_by_the_index(folder: Path) -> None:
    """The index decides which files count, each once."""
    for name in ("one", "two", "stray"):
        save_file({"a": torch.zeros(1)}, folder / f"{name}.safetensors")
    index = {"weight_map": {"a": "two.safetensors", "b": "one.safetensors", "c": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in inspect(folder).weights] == ["one.safetensors", "two.safetensors"]


def _index_names_a_missing_file(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')


def _index_names_no_file(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": ["x"]}}')


def _other_weights_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


def _a_pointer_instead_of_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "must hold a JSON object, not a list"),
        (lambda folder: (folder / "config.json").write_text("{}"), "no model_type"),
        (
            lambda folder: (folder / "generation_config.json").write_text("[" * 100_000),
            "is not valid JSON: .*recursion",
        ),
        (_index_names_no_file, r"index.json has \['x'\] for tensor a; the name of a file"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no weights"),
        (_other_weights_only, "There is pytorch_model.bin, which is not read"),
        (_index_names_a_missing_file, "names files that are missing in .*: gone.safetensors"),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("{}"), "has no weight_map"),
        (_cut_short, "model.safetensors is cut short"),
        (_a_pointer_instead_of_weights, "is not a safetensors file"),
    ],
)
def test_each_fault_has_its_message(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    """A fault in a folder is told by file and kind."""
    inspect(folder)
    spoil(folder)
    with pytest.raises(ModelFilesError, match=message):
        inspect(folder)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    """A folder that is not there is named."""
    with pytest.raises(ModelFilesAway, match="nowhere does not exist"):
        inspect(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("spoil", "is_away"),
    [
        (lambda folder: (folder / "config.json").unlink(), True),
        (lambda folder: (folder / "tokenizer.json").unlink(), True),
        (lambda folder: (folder / "model.safetensors").unlink(), True),
        (_cut_short, True),
        (lambda folder: (folder / "config.json").write_text("{"), False),
        (lambda folder: (folder / "config.json").write_text("{}"), False),
        (_a_pointer_instead_of_weights, False),
    ],
)
def test_what_is_away_may_come_back(folder: Path, spoil: Callable[[Path], object], is_away: bool) -> None:
    """A file that is missing, or still being copied, is looked for again; one that is wrong stays wrong."""
    spoil(folder)
    with pytest.raises(ModelFilesError) as raised:
        inspect(folder)
    assert isinstance(raised.value, ModelFilesAway) == is_away


def test_an_error_of_the_file_system_may_pass(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stale handle of a network file system, say, which is no FileNotFoundError."""

    def stale(path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "is_dir", stale)
    with pytest.raises(ModelFilesAway, match="Stale file handle"):
        inspect(folder)


def test_files_of_a_command() -> None:
    """A rank gets configuration and paths from its load command and needs no tokenizer."""
    files = ModelFiles.of_command('{"model_type": "llama"}', ["/models/x/a.safetensors"])
    assert files.config == {"model_type": "llama"}
    assert files.where == "/models/x"
    assert files.tokenizer is None
