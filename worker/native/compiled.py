"""C++ sources compiled on the host, once for each version of a source, and kept in the user's cache.

A source may have parts, of which a library has those that were asked for: less is compiled. A library with more parts
takes the place of one with fewer.

A library for this processor is kept once it has passed its own check in a child process, because on some virtual
machines a processor's flags promise instructions that fault. If it fails, it is compiled with fewer instructions.
Without a compiler, or if all fails, callers use another implementation.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Generator, Mapping
from pathlib import Path

import structlog

from control.cache import files as cache_files

log = structlog.get_logger()

FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
_MODEST = ("-O1", "-fexpensive-optimizations", "-fgcse", "-fschedule-insns2", "-fstrict-aliasing")
"""Sources for this processor say themselves what is unrolled and how vectors are used. Of what GCC does at -O2, these
passes make a difference for them: the products are as fast, and are compiled in three quarters of the time."""
_FOR_CLANG = ("-O2",)
"""Behind the others: Clang inlines too little at -O1, and does not know all of these passes."""
_NEWER = ("avx512fp16", "avx512bf16", "avx512vnni", "avxvnni", "amx-tile", "amx-int8", "amx-bf16")
INSTRUCTIONS: dict[str, tuple[str, ...]] = {
    "all": ("-march=native", *_MODEST),
    "no VNNI, 16-bit arithmetic or AMX": ("-march=native", *(f"-mno-{name}" for name in _NEWER), *_MODEST),
    "AVX2": ("-mavx2", "-mfma", "-mf16c", *_MODEST),
}
"""Instructions of the processor that a library may use → the compiler's flags, tried in this order."""
COMPILE_WITHIN_S = 110.0
"""Some five times what all kinds of weights take on an idle core: a compiler on a busy host is slow, and no failure.
Less than what the leader grants a load that stands still."""
CHECK_WITHIN_S = 20.0
_CHECK = """
import ctypes, sys
check = ctypes.CDLL(sys.argv[1]).furrow_check
check.restype = ctypes.c_char_p
wrong = check()
sys.exit(wrong.decode() if wrong else 0)
"""


class CheckFailed(Exception):
    """A library does not work on this processor; the message says how that was seen."""


_libraries: dict[Path, list[tuple[int, ctypes.CDLL | None]]] = {}
"""By source, the libraries of this process with their parts; None for parts that can't be had."""
_reasons: dict[Path, str] = {}
"""By source, why the last attempt gave no library."""
_lock = threading.Lock()


def library(source: Path, *, for_this_processor: bool = False, parts: int | None = None) -> ctypes.CDLL | None:
    """The loaded library of `source` and the headers below its folder; None if it can't be compiled, or fails its check
    with any set of instructions. May take some seconds the first time. A library for this processor does not run on a
    lesser one; it exports `furrow_check`, which returns null or the first wrong result. `parts` is a set of bits, at
    least which the library has: the source finds them in FURROW_KINDS."""
    wanted = parts or 0
    with _lock:
        here = _libraries.setdefault(source, [])
        for had, loaded in here:
            if (had & wanted == wanted) if loaded is not None else (had & wanted == had):
                return loaded
        had, loaded = _first(source, INSTRUCTIONS if for_this_processor else {"": ()}, parts)
        here.append((had, loaded))
        return loaded


def reason(source: Path) -> str:
    """Why `library` returned None for `source`, and what helps, as part of a sentence; "" where it did not."""
    return _reasons.get(source, "")


def compiler_command() -> str | None:
    """The command of the C++ compiler; None where there is none."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def was_compiled(stem: str) -> bool:
    """True if a library of a source with this stem was compiled before, in any version."""
    return any(cache_files.folder("compiled").glob(f"{stem}-*.so"))


def source_digest(source: Path) -> str:
    """Twelve hexadecimal digits of a source with its headers."""
    return hashlib.sha256(b"|".join(_sources(source))).hexdigest()[:12]


def _sources(source: Path) -> list[bytes]:
    return [source.read_bytes(), *(header.read_bytes() for header in sorted(source.parent.rglob("*.h")))]


def _first(source: Path, variants: Mapping[str, tuple[str, ...]], parts: int | None) -> tuple[int, ctypes.CDLL | None]:
    """The first of the variants (instructions → the compiler's flags) that compiles and passes its check, after its
    parts."""
    for instructions, flags in variants.items():
        try:
            had, loaded = _load(source, flags, parts)
            _reasons[source] = "" if loaded is not None else "there is no C++ compiler (c++, g++ or clang++, or CXX)"
            return had, loaded
        except CheckFailed as error:
            _reasons[source] = f"the compiled code does not work on this processor: {error}"
            log.warning(
                "C++ code fails on this processor",
                instructions=instructions,
                reason=str(error),
                remedy="fewer instructions are used, or torch; please report this line and the processor's name",
                action="check_library",
            )
        except (OSError, subprocess.SubprocessError) as error:
            output = (getattr(error, "stderr", None) or b"").decode()[-2000:]
            _reasons[source] = _described(error)
            log.warning(
                "compilation failed", source=source.name, reason=_reasons[source], error=str(error), output=output,
                action="compile",
            )  # fmt: skip
            if not isinstance(error, subprocess.CalledProcessError):
                break
    return parts or 0, None


def _described(error: OSError | subprocess.SubprocessError) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return (
            f"the C++ compiler did not end within {error.timeout:g} s; start it again when this host has less other "
            "work, or with more processors"
        )
    if isinstance(error, subprocess.CalledProcessError):
        return "the C++ compiler failed, with an output that this rank's log has"
    return f"the C++ compiler could not be run: {error}"


def _load(source: Path, more_flags: tuple[str, ...], parts: int | None) -> tuple[int, ctypes.CDLL | None]:
    """Raises CheckFailed, OSError or SubprocessError; None without a compiler."""
    compiler = compiler_command()
    words = (
        *_sources(source),
        " ".join(FLAGS + more_flags).encode(),
        (_processor() if more_flags else platform.machine()).encode(),
        platform.libc_ver()[1].encode(),
    )
    wanted, stem = parts or 0, f"{source.stem}-{hashlib.sha256(b'|'.join(words)).hexdigest()[:24]}"
    name = f"{stem}.so" if parts is None else f"{stem}-{parts:x}.so"
    refused = (cache_files.folder("compiled") / name).with_suffix(".refused")
    if (found := _kept(stem, wanted)) is not None:
        return found
    if refused.exists():
        raise CheckFailed(refused.read_text().strip())
    if compiler is None:
        return wanted, None
    try:
        folder = cache_files.folder("compiled")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:  # a home that can't be written to: compiled anew by each process
        folder = None
    with _alone(folder), tempfile.TemporaryDirectory(prefix="compile-", dir=folder) as scratch:
        if (found := _kept(stem, wanted)) is not None:  # another process compiled it meanwhile
            return found
        fresh = Path(scratch) / name
        # Hidden: the loader would give a library the tables of another one in the process, which has other parts.
        chosen = () if parts is None else ("-fvisibility=hidden", f"-DFURROW_KINDS={parts:#x}")
        for_compiler = _FOR_CLANG if "clang" in Path(compiler).resolve().name else ()
        command = [compiler, *FLAGS, *more_flags, *for_compiler, *chosen, "-o", str(fresh), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_WITHIN_S)
        if more_flags and (reason := failure(fresh)):
            if folder is not None:
                refused.write_text(f"{reason}\n")
            raise CheckFailed(reason)
        loaded = ctypes.CDLL(str(fresh))
        if folder is not None:
            fresh.replace(folder / name)  # whole or not at all, however many compile it at the same time
        return wanted, loaded


def _kept(stem: str, wanted: int) -> tuple[int, ctypes.CDLL] | None:
    """The smallest library in the cache that has the parts `wanted`, after its parts."""
    found: list[tuple[int, Path]] = []
    for path in cache_files.folder("compiled").glob(f"{stem}*.so"):
        parts = path.stem[len(stem) + 1 :]
        found.append((int(parts, 16) if parts else 0, path))
    for parts, path in sorted(found, key=lambda one: (one[0].bit_count(), one[0])):
        if parts & wanted == wanted:
            cache_files.mark_used(path)
            return parts, ctypes.CDLL(str(path))
    return None


def failure(built: Path, within_s: float = CHECK_WITHIN_S) -> str:
    """Why the library `built` does not work on this processor; "" if it does. Its check runs in a child process, which
    an instruction that faults ends, and imports nothing but ctypes."""
    try:
        # -I and -S: neither the environment nor site-packages are read, so the child is there within milliseconds.
        child = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHECK, str(built)], capture_output=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"its check did not end within {within_s:g} s"
    if child.returncode < 0:
        return f"its check ended by {signal.Signals(-child.returncode).name}"
    said = child.stderr.decode(errors="replace").strip().splitlines()
    return (said or [f"its check ended with status {child.returncode}"])[-1] if child.returncode else ""


@contextlib.contextmanager
def _alone(folder: Path | None) -> Generator[None]:
    """The ranks of a host start together and want the same: one compiles, the others take what it made."""
    if folder is None:
        yield
        return
    with (folder / "lock").open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks: each compiles its own
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _processor() -> str:
    """The kind of processor and all that it can do, which a cluster's shared home may meet several of."""
    kept = ("model name", "flags", "Features", "CPU part")
    lines = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(kept))
