"""Sources that are compiled where they run: once, kept, and never in anybody's way."""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from worker.native import compiled

SOURCE = 'extern "C" int answer() { return 42; }\n'

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_libraries", {})
    path = tmp_path / "small.cpp"
    path.write_text(SOURCE)
    return path


def answer(library: ctypes.CDLL | None) -> int:
    assert library is not None
    return library.answer()


@needs_compiler
def test_it_is_compiled_once_for_each_version(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process finds it without a compiler; a source that has changed is another library."""
    assert answer(compiled.library(source)) == 42
    monkeypatch.setattr(compiled, "_libraries", {})
    with monkeypatch.context() as without:
        without.delenv("CXX", raising=False)
        without.setattr(compiled.shutil, "which", lambda name: None)
        assert answer(compiled.library(source)) == 42
    source.write_text(SOURCE.replace("42", "43"))
    monkeypatch.setattr(compiled, "_libraries", {})
    assert answer(compiled.library(source)) == 43
    assert len(list((source.parent / "cache").rglob("*.so"))) == 2


def test_without_a_compiler_there_is_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is no error."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert compiled.library(source) is None


@needs_compiler
def test_a_source_that_does_not_compile_is_one_line(source: Path) -> None:
    """With what the compiler said; it is not tried again."""
    source.write_text("no C++")
    with capture_logs() as logs:
        assert compiled.library(source) is None
        assert compiled.library(source) is None
    [line] = logs
    assert "error" in line["output"] and line["source"] == "small.cpp"


@needs_compiler
def test_a_home_that_can_t_be_written_to_keeps_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is there all the same."""
    occupied = source.parent / "occupied"
    occupied.write_text("a file, where a folder is wanted")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    assert answer(compiled.library(source)) == 42
    assert os.path.isfile(occupied)  # noqa: PTH113  # as it was
