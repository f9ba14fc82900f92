"""The best shipped library is used: of those that work, without a compiler."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from worker.native import compiled, host
from worker.native.compiled import InstructionSet

SOURCE = """
extern "C" const char* furrow_check(const long* shapes, long count) {
  return %s ? "a product gives 3 instead of 2" : nullptr;
}
extern "C" int answer() { return %d; }
"""
BEST, PLAIN, OTHER = (
    InstructionSet("best", ("fast",), ()),
    InstructionSet("plain", (), ()),
    InstructionSet("other", ("absent",), ()),
)

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source, on a host without a compiler whose processor lists `fast`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(compiled, "_libraries", {})
    monkeypatch.setattr(compiled, "compiler_command", lambda: None)
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "built")
    monkeypatch.setattr(compiled, "VARIANTS", {platform.machine(): (OTHER, BEST, PLAIN)})
    monkeypatch.setattr(compiled, "processor_flags", lambda: frozenset({"fast"}))
    (tmp_path / "built").mkdir()
    path = tmp_path / "small.cpp"
    path.write_text("one version")
    return path


def bring(source: Path, variant: InstructionSet, answer: int, wrong: str = "false") -> Path:
    """Compile what a wheel would have."""
    text = source.parent / f"{variant.name}.cpp"
    text.write_text(SOURCE % (wrong, answer))
    built = compiled.FOLDER / compiled.file_name(source, variant)
    subprocess.run(["c++", "-shared", "-fPIC", "-o", built, text], check=True, capture_output=True, timeout=50)
    return built


def loaded(source: Path, monkeypatch: pytest.MonkeyPatch, *shapes: int) -> int | None:
    """The answer of the library that a new process takes."""
    monkeypatch.setattr(compiled, "_libraries", {})
    library: ctypes.CDLL | None = compiled.load(source, for_this_processor=True, parts=0b101, shapes=shapes)
    return None if library is None else library.answer()


@needs_compiler
def test_the_best_for_this_processor_is_used_without_a_compiler(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that needs more than the processor lists is not tried. The control: a changed source has none."""
    monkeypatch.setattr(host, "SOURCE", source)
    monkeypatch.setattr(host, "NEEDED", {platform.machine(): ()})
    assert host.unavailable() == compiled.NO_COMPILER
    bring(source, OTHER, 3), bring(source, BEST, 2), bring(source, PLAIN, 1)
    assert loaded(source, monkeypatch) == 2
    assert host.unavailable() is None and not host.to_be_compiled()
    source.write_text("another version")
    assert loaded(source, monkeypatch) is None
    assert host.unavailable() == compiled.NO_COMPILER


@needs_compiler
def test_one_that_fails_its_check_is_left_out(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer instructions for the shapes that it fails with alone; a later process knows it without a trial."""
    bring(source, BEST, 2, wrong="count == 2 && shapes[0] == 64"), bring(source, PLAIN, 1)
    assert loaded(source, monkeypatch, 32, 1024) == 2
    with capture_logs() as logs:
        assert loaded(source, monkeypatch, 64, 1024) == 1
    assert [line["reason"] for line in logs] == ["a product gives 3 instead of 2"]
    monkeypatch.setattr(compiled, "failure", None)  # would be called by another trial
    assert loaded(source, monkeypatch, 64, 1024) == 1
    assert loaded(source, monkeypatch, 32, 1024) == 2


@needs_compiler
def test_one_that_ends_its_process_does_not_end_this_one(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an instruction does that the processor lists and lacks. With none left the source would be compiled here."""
    bring(source, BEST, 2, wrong="(__builtin_trap(), true)")
    with capture_logs() as logs:
        assert loaded(source, monkeypatch) is None
    assert logs[0]["reason"].startswith("its check ended by SIG")


def test_every_machine_that_the_kernels_run_on_has_variants() -> None:
    """The last of a machine needs no more than the sources do at least, or what all processors with it have."""
    assert compiled.VARIANTS.keys() == host.NEEDED.keys()
    for machine, variants in compiled.VARIANTS.items():
        assert set(host.NEEDED[machine]) <= set(variants[-1].needs)
        assert len({variant.name for variant in variants}) == len(variants)
