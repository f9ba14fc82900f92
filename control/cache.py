"""The user's cache of files that make the next start faster: listed, removed, limited."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

KINDS: dict[str, str] = {
    "compiled": "C++ libraries compiled for this processor, and reports on those that do not work",
    "models": "models taken from Python packages",
    "tokenizers": "tokenizers of GGUF files, converted",
    "verdicts": "verdicts on the kernels of a device",
    "weights": "packed weights of models, by rank",
}
"""The kinds of files → a description."""

TEMPORARY = ("write-", "compile-")
"""Prefixes of files and folders that are being written."""
LOCK = "lock"


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
            yield fresh
            fresh.flush()
            Path(fresh.name).replace(path)
        except BaseException:
            Path(fresh.name).unlink(missing_ok=True)
            raise


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
    and leave `spare` bytes free on the disk. False if that can't be reached: then none is removed. Raises OSError
    without a folder."""
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
