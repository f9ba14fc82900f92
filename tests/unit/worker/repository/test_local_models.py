"""Models of a folder and of the cache: that of Hugging Face files."""

from __future__ import annotations

from pathlib import Path

import pytest

from control.errors import SettingsError
from worker.repository.local_models import MOST_MODELS, local_models


def folder_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")


def file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF")


def test_folders_and_gguf_files_are_models(tmp_path: Path) -> None:
    """Also in folders of publishers; an encoder of images, a second part of a file and other files are none."""
    folder_model(tmp_path / "Qwen3-0.6B")
    file(tmp_path / "tiny-Q4_K_M.gguf")
    file(tmp_path / "publisher/repository/large-Q8_0-00001-of-00002.gguf")
    file(tmp_path / "publisher/repository/large-Q8_0-00002-of-00002.gguf")
    file(tmp_path / "publisher/repository/mmproj-f16.gguf")
    file(tmp_path / "notes/readme.txt")
    file(tmp_path / ".hidden/other.gguf")
    (tmp_path / "empty").mkdir()
    models = local_models(str(tmp_path))
    assert [(one.name, Path(one.source).relative_to(tmp_path).as_posix(), one.gguf) for one in models] == [
        ("Qwen3-0.6B", "Qwen3-0.6B", None),
        ("large-Q8_0", "publisher/repository/large-Q8_0-00001-of-00002.gguf", None),
        ("tiny-Q4_K_M", "tiny-Q4_K_M.gguf", None),
    ]


def test_two_of_one_name_get_their_folders(tmp_path: Path) -> None:
    file(tmp_path / "a/model.gguf")
    file(tmp_path / "b/model.gguf")
    file(tmp_path / "c/odd name{1}.gguf")
    assert [one.name for one in local_models(str(tmp_path))] == ["a/model", "b/model", "odd_name_1_"]


def test_what_has_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="no model"):
        local_models(str(tmp_path))
    with pytest.raises(SettingsError, match="no folder"):
        local_models(str(tmp_path / "missing"))
    for index in range(MOST_MODELS + 1):
        file(tmp_path / f"{index}.gguf")
    with pytest.raises(SettingsError, match="more than"):
        local_models(str(tmp_path))


def test_a_link_to_a_folder_above_ends(tmp_path: Path) -> None:
    """Folders are entered to a depth; a loop of links does not matter."""
    file(tmp_path / "a/model.gguf")
    (tmp_path / "a/up").symlink_to(tmp_path)
    assert local_models(str(tmp_path))


def test_the_cache_offers_what_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SettingsError, match="the cache"):
        local_models("*")
    for repository, complete in (("org--whole", True), ("org--half", False)):
        folder = tmp_path / f"models--{repository}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs/main").write_text("abc")
        snapshot = folder / "snapshots/abc"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text('{"model_type": "llama"}')
        if complete:
            write_weights(snapshot)
    assert [(one.name, one.source, one.gguf) for one in local_models("*")] == [("org/whole", "org/whole", None)]


def write_weights(snapshot: Path) -> None:
    header = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (snapshot / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (snapshot / "tokenizer.json").write_text("{}")
