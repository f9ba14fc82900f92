"""Models in Python packages: an installed one, one whose wheel is downloaded, and one that can't be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from control.errors import HubUnreachable, ModelFilesAway
from worker.repository import packaged, source

TINY = packaged.Package("furrow_tiny_model", "furrow-tiny", "1.0", "0" * 64, 4)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the cache, for a package that is not installed."""
    monkeypatch.setattr(packaged, "PACKAGED", {"tiny": TINY})
    monkeypatch.setattr(source, "PACKAGED", {"tiny": TINY})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_packaged_model_is_found_without_importing_its_package(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert packaged.packaged("tiny") is None and source.on_this_host("tiny") is None
    (tiny / "furrow_tiny_model").mkdir()
    (tiny / "furrow_tiny_model" / "__init__.py").write_text("raise RuntimeError")
    (tiny / "furrow_tiny_model" / "a.gguf").touch()
    monkeypatch.syspath_prepend(tiny)
    assert packaged.packaged("tiny") == tiny / "furrow_tiny_model" / "a.gguf"
    assert "furrow_tiny_model" not in sys.modules


def test_the_file_of_a_packaged_model_is_taken_from_its_wheel(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, by hash, without the package's dependencies; the next process finds it in the cache."""
    calls: list[tuple[list[str], str]] = []

    def install(command: list[str], **_: Any) -> None:
        calls.append((command, Path(command[-1]).read_text()))
        folder = Path(command[command.index("--target") + 1]) / "furrow_tiny_model"
        folder.mkdir(parents=True)
        (folder / "a.gguf").write_bytes(b"GGUF")

    monkeypatch.setattr(packaged.subprocess, "run", install)
    place = source.resolve("tiny")
    assert place.read_bytes() == b"GGUF" and place.is_relative_to(tiny / "furrow" / "models")
    assert source.resolve("tiny") == source.on_this_host("tiny") == place
    [(command, requirements)] = calls
    assert {"--no-deps", "--require-hashes", ":all:"} <= set(command)
    assert requirements == f"furrow-tiny==1.0 --hash=sha256:{'0' * 64}\n"
    assert os.listdir(place.parent) == [place.name]  # noqa: PTH208  # nothing else stays


def test_a_packaged_model_that_can_t_be_had_is_one_sentence(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A download that failed may be tried again; an environment without pip and uv says what to run."""

    def fail(command: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, command, stderr="a warning\nERROR: no index answers\n\n")

    monkeypatch.setattr(packaged.subprocess, "run", fail)
    with pytest.raises(HubUnreachable, match=r"furrow-tiny 1.0 could not be downloaded: ERROR: no index answers"):
        source.resolve("tiny")
    monkeypatch.setattr(packaged.PathFinder, "find_spec", lambda *_: None)
    monkeypatch.setattr(packaged.shutil, "which", lambda name: None)
    with pytest.raises(ModelFilesAway, match=r"neither pip nor uv here .* `pip install --no-deps furrow-tiny`"):
        source.resolve("tiny")
