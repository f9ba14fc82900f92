"""`furrow pull`, `list` and `rm`: on a cache that is made here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from control.errors import ModelFilesError
from ops.cli import cli, files
from tests import models
from worker.repository.packaged import kept_file
from worker.repository.source import on_this_host


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete repository, one that lacks its weights, and the file of a package."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    hub = tmp_path / "huggingface" / "hub"
    for name in ("org--whole", "org--part"):
        snapshot = hub / f"models--{name}" / "snapshots" / "1"
        models.make("qwen3", snapshot)
        (hub / f"models--{name}" / "refs").mkdir()
        (hub / f"models--{name}" / "refs" / "main").write_text("1")
    next((hub / "models--org--part").rglob("*.safetensors")).unlink()
    (hub / ".locks" / "models--org--whole").mkdir(parents=True)
    kept_file("smollm2").parent.mkdir(parents=True)
    kept_file("smollm2").write_bytes(b"GGUF" * 256)
    return hub


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_downloaded_models_are_listed_with_their_sizes(cache: Path) -> None:
    listed = {one["name"]: one for one in json.loads(run("list", "--json").stdout)}
    assert {name: one["complete"] for name, one in listed.items()} == {
        "org/whole": True,
        "org/part": False,
        "smollm2": True,
    }
    files = [file for file in (cache / "models--org--whole").rglob("*") if file.is_file()]
    assert listed["org/whole"]["bytes"] == sum(file.stat().st_size for file in files)
    assert listed["smollm2"]["bytes"] == 1024
    table = run("list").stdout
    assert "incomplete" in table and "3 models" in table


def test_a_model_is_deleted_by_its_name(cache: Path) -> None:
    """Others stay; a name that is not listed deletes none, a path to elsewhere is no name."""
    for wrong in ("org/other", "../huggingface", "org"):
        with pytest.raises(ModelFilesError, match="`furrow list` shows"):
            run("rm", "org/whole", wrong)
    assert on_this_host("org/whole") is not None
    assert "org/whole deleted" in run("rm", "org/whole").stdout
    assert on_this_host("org/whole") is None
    assert sorted(one.name for one in cache.iterdir()) == [".locks", "models--org--part"]
    assert not list((cache / ".locks").iterdir())
    run("rm", "smollm2", "org/part")
    assert "No model is downloaded" in run("list").stdout


def test_a_model_that_is_here_is_not_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its path is printed; another one is downloaded by a process of its own."""
    calls: list[tuple[object, ...]] = []

    class Download:
        def __init__(self, *arguments: object) -> None:
            calls.append(arguments)

        def run(self, tell: object) -> Path:
            return Path("/there")

    monkeypatch.setattr(files, "Download", Download)
    assert run("pull", "org/whole").stdout == f"{cache / 'models--org--whole/snapshots/1'}\n"
    assert not calls
    assert run("pull", "org/part").stdout == "/there\n"
    assert calls == [("org/part", "main", cache, None)]
