"""Sources are compiled once where they run: stored, and never in anybody's way."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from control import cache as cache_files
from control.errors import SettingsError
from tests.waiting import until
from worker.models.torch.layers import packing
from worker.native import compiled, library
from worker.native.host import SOURCE as NATIVE
from worker.native.library import bits_of

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
    assert answer(compiled.load(source)) == 42
    monkeypatch.setattr(compiled, "_libraries", {})
    with monkeypatch.context() as without:
        without.delenv("CXX", raising=False)
        without.setattr(compiled.shutil, "which", lambda name: None)
        assert answer(compiled.load(source)) == 42
    source.write_text(SOURCE.replace("42", "43"))
    monkeypatch.setattr(compiled, "_libraries", {})
    assert answer(compiled.load(source)) == 43
    assert len(list((source.parent / "cache").rglob("*.so"))) == 2


def test_without_a_compiler_there_is_none(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is no error."""
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert compiled.load(source) is None


@needs_compiler
def test_a_source_that_does_not_compile_is_one_line(source: Path) -> None:
    """With what the compiler said; it is not tried again."""
    source.write_text("no C++")
    with capture_logs() as logs:
        assert compiled.load(source) is None
        assert compiled.load(source) is None
    [line] = logs
    assert "error" in line["output"] and line["source"] == "small.cpp"


def test_a_slow_compiler_is_named_as_the_reason(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host is no host without a compiler: the message says to start again."""
    slow = source.parent / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setattr(compiled, "COMPILE_WITHIN_S", 0.1)
    monkeypatch.setattr(library, "SOURCE", source)
    assert library.load_library() is None
    assert "did not end within 0.1 s; start it again" in library.reason_missing()
    with pytest.raises(
        SettingsError, match=r"--quant q4k is computed in C\+\+ only, but the C\+\+ compiler did not end"
    ):
        packing("q4k", torch.float32, torch.device("cpu"))


@needs_compiler
def test_a_home_that_can_t_be_written_to_keeps_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is there all the same."""
    occupied = source.parent / "occupied"
    occupied.write_text("a file, where a folder is wanted")
    monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
    assert answer(compiled.load(source)) == 42
    assert os.path.isfile(occupied)  # noqa: PTH113  # as it was


CHECKED = """
extern "C" const char* furrow_check() {
#if defined(__AVX512F__) || defined(__AVX512VNNI__)
%s
#endif
  return nullptr;
}
extern "C" int answer() {
#ifdef __AVX512F__
  return 512;
#else
  return 2;
#endif
}
"""

needs_vectors = pytest.mark.skipif(
    not Path("/proc/cpuinfo").exists() or "avx2" not in Path("/proc/cpuinfo").read_text(), reason="no AVX2 here"
)


def checked(source: Path, faulty: str) -> tuple[int, list[str]]:
    """The answer of the library that was taken in the end, and the reasons why others were not."""
    source.write_text(CHECKED % faulty)
    with capture_logs() as logs:
        found = answer(compiled.load(source, for_this_processor=True))
    return found, [line["reason"] for line in logs if line["action"] == "check_library"]


@needs_compiler
@needs_vectors
@pytest.mark.parametrize(
    ("faulty", "reason"),
    [
        ("__builtin_trap();", "its check ended by SIG"),
        ('return "a product gives 3 instead of 2";', "a product gives 3 instead of 2"),
        ("for (volatile int i = 0;; ) i = i + 1;", "its check did not end within 1 s"),
        ("*(volatile int*)8 = 1;", "its check ended by SIGSEGV"),
    ],
)
def test_instructions_that_fail_are_left_out(
    source: Path, faulty: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They end a child process and not this one; fewer are used, and the next process knows that at once."""
    monkeypatch.setattr(compiled.failure, "__defaults__", ((), 1.0))
    found, reasons = checked(source, faulty)
    if not reasons:
        pytest.skip("this processor has no AVX-512, so nothing was wrong with it")
    assert found == 2
    assert all(said.startswith(reason) for said in reasons)
    monkeypatch.setattr(compiled, "_libraries", {})
    monkeypatch.setattr(compiled, "failure", None)  # would be called if anything was compiled again
    assert checked(source, faulty) == (2, reasons)


@needs_compiler
@needs_vectors
def test_a_library_that_works_has_all_instructions(source: Path) -> None:
    """Nothing is left out where nothing is wrong."""
    found, reasons = checked(source, "")
    assert reasons == []
    assert found == (512 if "avx512f" in Path("/proc/cpuinfo").read_text() else 2)


WRONG_AT_ONE_SHAPE = """
extern "C" const char* furrow_check(const long* shapes, long count) {
  return count == 2 && shapes[0] == 64 ? "wrong with 64 heads" : nullptr;
}
extern "C" int answer() { return 42; }
"""


@needs_compiler
@needs_vectors
def test_a_model_s_shapes_are_checked_once(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that another model uses is not loaded for shapes that it fails with, by later processes either."""
    source.write_text(WRONG_AT_ONE_SHAPE)

    def loaded(*shapes: int) -> ctypes.CDLL | None:
        monkeypatch.setattr(compiled, "_libraries", {})
        return compiled.load(source, for_this_processor=True, shapes=shapes)

    assert answer(loaded(16, 1024)) == 42
    assert answer(loaded(32, 1024)) == 42
    with capture_logs() as logs:
        assert loaded(64, 1024) is None
    assert [line["reason"] for line in logs] == ["wrong with 64 heads"] * len(compiled.INSTRUCTIONS)
    monkeypatch.setattr(compiled, "failure", None)  # would be called if anything was tried again
    assert answer(loaded(32, 1024)) == 42
    assert loaded(64, 1024) is None


@needs_compiler
@needs_vectors
def test_where_every_set_of_instructions_fails_there_is_no_library(source: Path) -> None:
    """Torch computes then; the reason is said for each set."""
    source.write_text('extern "C" const char* furrow_check() { return "wrong"; }')
    with capture_logs() as logs:
        assert compiled.load(source, for_this_processor=True) is None
    assert [line["instructions"] for line in logs] == list(compiled.INSTRUCTIONS)


MUTATIONS = {
    "product.h": ("minus(sum, load(matrix.sums + output))", "sum"),
    "attention.h": ("task.position + token + 1 - task.window", "task.position + token + 2 - task.window"),
}
MUTATED = """
#include <cstdlib>
#include <cstring>
// Whether the file `name` is wrong, which the environment says when the library is loaded.
inline bool is_wrong(const char* name) {
  const char* wrong = std::getenv("WRONG");
  return wrong && !std::strcmp(wrong, name);
}
inline const bool wrong_product = is_wrong("product.h"), wrong_attention = is_wrong("attention.h");
"""


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with all mutations, each of which the environment switches on: one compilation for all tests."""
    folder = tmp_path_factory.mktemp("mutated")
    sources = folder / "source"
    shutil.copytree(NATIVE.parent, sources)
    for name, (old, new) in MUTATIONS.items():
        text = (sources / name).read_text()
        assert text.count(old) >= 1
        switch = f"wrong_{name.removesuffix('.h')}"
        (sources / name).write_text(text.replace(old, f"({switch} ? {new} : {old})"))
    header = folder / "mutated.h"
    header.write_text(MUTATED)
    kinds = f"-DFURROW_KINDS={bits_of(['int8']):#x}"  # the others take most of the compiler's time
    flags = ["-std=c++17", "-Og", "-shared", "-fPIC", "-march=native", kinds, "-include", header]
    built = folder / "library.so"
    subprocess.run(["c++", *flags, "-o", built, sources / "native.cpp"], check=True, capture_output=True, timeout=50)
    return built


@needs_compiler
@needs_vectors
@pytest.mark.parametrize("name", [None, *MUTATIONS])
def test_the_check_finds_what_is_wrong(name: str | None, mutated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control passes; a wrong integer sum and a window that is off by one are found."""
    monkeypatch.setenv("WRONG", name or "")
    reason = compiled.failure(mutated)
    if name == "product.h" and "vnni" not in Path("/proc/cpuinfo").read_text():
        assert reason == ""  # nothing is subtracted there
    else:
        assert (" gives " in reason) == (name is not None), reason


PARTS = """
#pragma GCC visibility push(default)
extern "C" int answer() { return FURROW_KINDS; }
"""


@needs_compiler
def test_a_library_with_more_parts_takes_the_place_of_one_with_fewer(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the process and in the cache; the smallest one that has them. The control: other parts are compiled."""
    source.write_text(PARTS)
    assert answer(compiled.load(source, parts=0b0111)) == 0b0111
    assert answer(compiled.load(source, parts=0b0010)) == 0b0111
    assert answer(compiled.load(source, parts=0b1000)) == 0b1000
    monkeypatch.setattr(compiled, "_libraries", {})
    assert answer(compiled.load(source, parts=0b0100)) == 0b0111
    monkeypatch.setattr(compiled, "_libraries", {})
    assert answer(compiled.load(source, parts=0b1111)) == 0b1111
    monkeypatch.setattr(compiled, "_libraries", {})
    assert answer(compiled.load(source, parts=0b0001)) == 0b0111
    assert len(list((source.parent / "cache").rglob("*.so"))) == 3


HOLDER = """
import sys
from pathlib import Path
from control import cache
with cache.locked(Path(sys.argv[1])):
    print(flush=True)
    input()
"""


@needs_compiler
def test_a_start_that_waits_for_a_stopped_process_says_so(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, with the lock, its holder and the remedy, which lets the start go on. The control: a short wait says
    nothing."""
    source.write_text(PARTS)
    folder = cache_files.made_folder("compiled")
    monkeypatch.setattr(cache_files, "LONG_WAIT_S", 0.05)
    libraries: list[ctypes.CDLL | None] = []
    start = threading.Thread(target=lambda: libraries.append(compiled.load(source, parts=1)))
    command = [sys.executable, "-c", HOLDER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder, capture_logs() as logs:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        start.start()
        [line] = until(lambda: list(logs))
        assert line["action"] == "wait_for_lock"
        assert line["file"] == str(folder / "lock")
        assert f"process {holder.pid} on " in line["holder"]
        assert line["locked_for_s"] >= 0
        assert f"kill -CONT {holder.pid}" in line["remedy"]
        holder.send_signal(signal.SIGCONT)
        holder.communicate(b"\n")
        start.join(30)
        assert len(logs) == 1
        monkeypatch.setattr(cache_files, "LONG_WAIT_S", 30.0)
        with cache_files.locked(folder):
            second = threading.Thread(target=lambda: libraries.append(compiled.load(source, parts=2)))
            second.start()
            until(lambda: any(thread.name == cache_files.NOTICE for thread in threading.enumerate()))
        second.join(30)
        assert len(logs) == 1
    assert [answer(library) for library in libraries] == [1, 2]


WRITER = """
import sys
from pathlib import Path
from control import cache
with cache.scratch(Path(sys.argv[1])) as folder:
    (folder / "half.so").write_text("half")
    print(folder, flush=True)
    input()
"""


def writer(place: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(place)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@needs_compiler
def test_the_folder_of_a_killed_compilation_is_removed(source: Path) -> None:
    """With the next compilation. One of a process that still writes stays."""
    place = cache_files.made_folder("compiled")
    with writer(place) as first, writer(place) as second:
        assert first.stdout is not None
        assert second.stdout is not None
        killed, alive = Path(first.stdout.readline().strip()), Path(second.stdout.readline().strip())
        first.kill()
        first.wait()
        assert killed.is_dir()
        assert answer(compiled.load(source)) == 42
        assert not killed.exists()
        assert (alive / "half.so").is_file()
        assert second.communicate("\n", timeout=30) == ("", None)
        assert not alive.exists()
