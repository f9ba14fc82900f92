"""C++ sources compiled on the host, once for each version of a source, and kept in the user's cache.

Without a compiler, or if it fails, callers use another implementation.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Generator
from pathlib import Path

import structlog

log = structlog.get_logger()

FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
FOR_THIS_PROCESSOR = ("-march=native", "-O2")
"""Without the first, another host may use what the same cache keeps. Such sources say themselves what is to be unrolled
and how it uses vectors; more optimising would only take longer."""
COMPILE_WITHIN_S = 60.0

_libraries: dict[Path, ctypes.CDLL | None] = {}
_lock = threading.Lock()


def library(source: Path, *, for_this_processor: bool = False) -> ctypes.CDLL | None:
    """The loaded library of `source` and the headers beside it; None if it can't be compiled. May take some seconds the
    first time. A library for this processor does not run on a lesser one."""
    with _lock:
        if source not in _libraries:
            try:
                _libraries[source] = _load(source, FOR_THIS_PROCESSOR if for_this_processor else ())
            except (OSError, subprocess.SubprocessError) as error:
                output = getattr(error, "stderr", None) or b""
                log.warning(
                    "compilation failed",
                    source=source.name,
                    error=str(error),
                    output=output.decode()[-2000:],
                    action="compile",
                )
                _libraries[source] = None
        return _libraries[source]


def _load(source: Path, more_flags: tuple[str, ...]) -> ctypes.CDLL | None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    words = (
        source.read_bytes(),
        *(header.read_bytes() for header in sorted(source.parent.glob("*.h"))),
        " ".join(FLAGS + more_flags).encode(),
        (_processor() if more_flags else platform.machine()).encode(),
        platform.libc_ver()[1].encode(),
    )
    name = f"{source.stem}-{hashlib.sha256(b'|'.join(words)).hexdigest()[:24]}.so"
    kept = _cache() / name
    if kept.exists():
        return ctypes.CDLL(str(kept))
    if compiler is None:
        return None
    try:
        kept.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = kept.parent
    except OSError:  # a home that can't be written to: compiled anew by each process
        folder = None
    with _alone(folder), tempfile.TemporaryDirectory(prefix="compile-", dir=folder) as scratch:
        if kept.exists():  # by whom this waited for
            return ctypes.CDLL(str(kept))
        fresh = Path(scratch) / name
        command = [compiler, *FLAGS, *more_flags, "-o", str(fresh), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_WITHIN_S)
        loaded = ctypes.CDLL(str(fresh))
        if folder is not None:
            fresh.replace(kept)  # whole or not at all, however many compile it at the same time
        return loaded


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


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "furrow" / "compiled"
