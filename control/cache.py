"""The user's cache of files that make the next start faster: listed, removed, limited, and locked while one is made."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import shutil
import tempfile
import threading
import time
from collections.abc import Generator
from contextvars import copy_context
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

import structlog

log = structlog.get_logger()

KINDS: dict[str, str] = {
    "compiled": "C++ libraries compiled for this processor, and reports on those that do not work",
    "models": "models taken from Python packages",
    "tokenizers": "tokenizers of GGUF files, converted",
    "verdicts": "verdicts on the kernels of a device",
    "weights": "packed weights of models, by rank",
}
"""The kinds of files → a description."""

TEMPORARY = ("write-", "compile-")
"""Prefixes of files and folders that are being written; the second one is of earlier versions."""
LOCK = "lock"
"""A file in the folder of a kind. Its text is the id and the host of the process that locked it last."""
NOTICE = "lock notice"
"""The name of the thread that logs a long wait."""
LONG_WAIT_S = 30.0
"""A wait for the lock of a folder that is logged. A compilation on an idle core is shorter; trials of kernels on a GPU,
and a compilation on a busy host, may take longer."""


@dataclass(frozen=True)
class Entry:
    """A file of the cache. `used_at` is the time of its last use, in seconds since 1970."""

    kind: str
    path: Path
    bytes: int
    used_at: float

    @property
    def name(self) -> str:
        return self.path.name


def folder(kind: str) -> Path:
    """The folder of a kind, which may not exist: below XDG_CACHE_HOME, else below ~/.cache. For a user without a home
    it is one that can't be made."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        base = Path(os.devnull)
    return base / "furrow" / kind


def made_folder(kind: str) -> Path:
    """The folder of a kind, made for this user alone where there was none. Raises OSError."""
    place = folder(kind)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    return place


@contextlib.contextmanager
def replacing(path: Path) -> Generator[IO[bytes]]:
    """A file to write that takes the place of `path`: whole or not at all, however many write it. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=TEMPORARY[0], delete=False) as fresh:
        try:
            _mark_alive(fresh.fileno())
            yield fresh
            fresh.flush()
            Path(fresh.name).replace(path)
        except BaseException:
            Path(fresh.name).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def scratch(place: Path | None) -> Generator[Path]:
    """A folder in `place` for files that are being made, removed at the end; without `place` it is one of the system's.
    Folders that killed processes left are removed too. Raises OSError."""
    if place is not None:
        remove_abandoned(place)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY[0], dir=place) as folder:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            _mark_alive(descriptor)
            yield Path(folder)
        finally:
            os.close(descriptor)


def _mark_alive(descriptor: int) -> None:
    """Lock a file or folder that is being written: the lock ends with the process."""
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def remove_abandoned(place: Path) -> None:
    """Remove unfinished files and folders of processes that have ended. A file system without locks keeps them."""
    for path in (path for prefix in TEMPORARY for path in place.glob(f"{prefix}*")):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def locked(place: Path) -> Generator[None]:
    """Hold the lock of a folder: one process of a host makes a file, and those that start with it take the result. A
    wait of LONG_WAIT_S is logged once: a process that is stopped keeps its lock. A file system without locks grants
    all at once. Raises OSError for a folder that can't be written to."""
    with (place / LOCK).open("ab", buffering=0) as file:  # not "wb", which would remove the name of the holder
        with contextlib.suppress(OSError):
            _acquire(file)
            file.truncate(0)
            file.write(f"{os.getpid()} {platform.node()}\n".encode())
        yield


def _acquire(lock: FileIO) -> None:
    """Raises OSError on a file system without locks."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    context = copy_context()  # the log line has the model, the replica and the rank
    notice = threading.Timer(LONG_WAIT_S, context.run, (_log_wait, Path(os.fsdecode(lock.name)), time.time()))
    notice.daemon = True
    notice.name = NOTICE
    notice.start()
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        notice.cancel()


def _log_wait(lock: Path, waits_since: float) -> None:
    """Log the holder of a lock, as far as its file names it. The lock was acquired at the file's last change."""
    pid, host = "", ""
    locked_at = waits_since
    with contextlib.suppress(OSError, ValueError):
        pid, host = lock.read_text().split()
        locked_at = lock.stat().st_mtime
    log.warning(
        "this start waits for a lock of the cache",
        file=str(lock),
        holder=f"process {pid} on {host}" if pid else "a process that did not write its id",
        locked_for_s=round(time.time() - locked_at),
        remedy=(
            f"on {host or 'its host'}: `kill -CONT {pid or 'PID'}` where `ps -o stat= -p {pid or 'PID'}` shows T, as a "
            "process that is stopped keeps its lock; any other process still works, so wait"
        ),
        action="wait_for_lock",
    )


def entries(kind: str) -> list[Entry]:
    """The files of a kind, the one that was used last first. An absent or unreadable folder has none."""
    files: list[Entry] = []
    with contextlib.suppress(OSError):
        for path in folder(kind).iterdir():
            if path.name == LOCK or path.name.startswith(TEMPORARY):
                continue
            with contextlib.suppress(OSError):  # removed meanwhile
                stat = path.stat()
                files.append(Entry(kind, path, stat.st_size, stat.st_mtime))
    return sorted(files, key=lambda one: (-one.used_at, one.name))


def mark_used(path: Path) -> None:
    """Set the time of a file's last use to now, where its folder can be written to."""
    with contextlib.suppress(OSError):
        os.utime(path)


def remove(entry: Entry) -> bool:
    """Delete a file; False if that is not permitted. Processes that have it open keep its content."""
    try:
        entry.path.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def make_room(kind: str, needed: int, limit: int, spare: int) -> bool:
    """Remove the files of a kind that were not used for longest, until `needed` more bytes keep the kind within `limit`
    and leave `spare` bytes free on the disk. False if that can't be reached: then none is removed. Files that a killed
    process left unfinished are always removed. Raises OSError without a folder."""
    remove_abandoned(folder(kind))
    files = entries(kind)
    total = sum(entry.bytes for entry in files)
    free = shutil.disk_usage(folder(kind)).free
    if needed > limit or free + total < needed + spare:
        return False
    while total + needed > limit or shutil.disk_usage(folder(kind)).free < needed + spare:
        if not files:
            return False
        oldest = files.pop()
        if remove(oldest):
            total -= oldest.bytes
    return True
