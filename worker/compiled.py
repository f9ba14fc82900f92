"""Small C++ sources compiled where they run, once for each version of a source, and kept under the user's cache.

A host without a compiler, or where one fails, goes on without: whoever asks has another way.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import structlog

log = structlog.get_logger()

FLAGS = ("-std=c++17", "-O3", "-shared", "-fPIC")
"""Nothing of this processor in particular: another host may use the same cache."""
COMPILE_WITHIN_S = 60.0

_libraries: dict[Path, ctypes.CDLL | None] = {}
_lock = threading.Lock()


def library(source: Path) -> ctypes.CDLL | None:
    """The loaded library of `source`, which may take a second the first time; None where there is no way to it."""
    with _lock:
        if source not in _libraries:
            try:
                _libraries[source] = _load(source)
            except (OSError, subprocess.SubprocessError) as error:
                output = getattr(error, "stderr", None) or b""
                log.warning("could not compile", source=source.name, error=str(error), output=output.decode()[-2000:])
                _libraries[source] = None
        return _libraries[source]


def _load(source: Path) -> ctypes.CDLL | None:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    words = (
        source.read_bytes(),
        " ".join(FLAGS).encode(),
        platform.machine().encode(),
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
    with tempfile.TemporaryDirectory(prefix="compile-", dir=folder) as scratch:
        fresh = Path(scratch) / name
        command = [compiler, *FLAGS, "-o", str(fresh), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_WITHIN_S)
        loaded = ctypes.CDLL(str(fresh))
        if folder is not None:
            fresh.replace(kept)  # whole or not at all, however many compile it at the same time
        return loaded


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "furrow" / "compiled"
