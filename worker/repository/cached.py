"""The downloaded models of this user: listed and removed, in the cache of Hugging Face files and in Furrow's own."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from control import cache as cache_files
from control.errors import ModelFilesError
from worker.repository.packaged import PACKAGED, kept_file
from worker.repository.source import cache_folder, on_this_host

PREFIX = "models--"
"""Of a repository's folder in the cache of Hugging Face files."""


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model by the name that `furrow run` takes; `bytes` on the disk, `used_at` in seconds since 1970."""

    name: str
    path: Path
    bytes: int
    used_at: float
    complete: bool


def cached_models() -> tuple[CachedModel, ...]:
    """All, the one that was used last first. A repository of which files are missing is one too."""
    folder, _ = cache_folder(None, os.environ)
    models = [_repository(path) for path in folder.glob(f"{PREFIX}*") if path.is_dir()]
    for name in PACKAGED:
        if (path := kept_file(name)).is_file():
            stat = path.stat()
            models.append(CachedModel(name, path, stat.st_size, stat.st_mtime, complete=True))
    return tuple(sorted(models, key=lambda one: (-one.used_at, one.name)))


def _repository(path: Path) -> CachedModel:
    name = path.name.removeprefix(PREFIX).replace("--", "/")
    size, used_at = 0, 0.0
    for file in path.rglob("*"):
        stat = file.lstat()  # a link of a snapshot is not its blob
        used_at = max(used_at, stat.st_mtime)
        if not file.is_symlink() and file.is_file():
            size += stat.st_size
            used_at = max(used_at, stat.st_atime)
    return CachedModel(name, path, size, used_at, _is_complete(name, path))


def _is_complete(name: str, path: Path) -> bool:
    """With any of its GGUF files, where it has several."""
    ggufs = {file.name for file in path.glob("snapshots/*/*.gguf")} or {None}
    for gguf in ggufs:
        try:
            if on_this_host(name, gguf) is not None:
                return True
        except (ModelFilesError, OSError, ValueError):
            continue
    return False


def remove(model: CachedModel) -> None:
    """Delete its files. Processes that have them open keep their content. Raises OSError."""
    if model.path.is_dir():
        shutil.rmtree(model.path)
        shutil.rmtree(model.path.parent / ".locks" / model.path.name, ignore_errors=True)
    elif not cache_files.remove(cache_files.Entry("models", model.path, model.bytes, model.used_at)):
        raise PermissionError(f"{model.path} can't be deleted")
