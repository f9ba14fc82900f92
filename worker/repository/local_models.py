"""The models on this host: complete ones of a folder or a cache, and downloaded ones, which are listed and removed."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from control import cache as cache_files
from control.errors import ModelFilesError, SettingsError
from worker.repository.gguf.selection import first_parts, model_stem
from worker.repository.packaged import PACKAGED, kept_file
from worker.repository.source import cache_folder, on_this_host

# The models that are complete on this host, in a folder or in the cache of Hugging Face files, for those who offer all
# of them.


DEPTH = 3
"""Folders between the named one and a model: LM Studio keeps PUBLISHER/REPOSITORY/FILE."""
MOST_MODELS = 1_000
CACHE = "*"
"""Names the cache in place of a folder."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`source` and `gguf` as in a specification; `place` tells models of one name apart."""

    name: str
    source: str
    gguf: str | None = None
    place: str = ""


def local_models(where: str) -> list[LocalModel]:
    """Those of a folder, or of the cache for `*`, in order of name. Raises SettingsError where there is none."""
    if where == CACHE:
        folder, reason = cache_folder(None, os.environ)
        models = list(_in_cache(folder))
        place_name = f"the cache {folder} ({reason})"
    else:
        folder = Path(where).expanduser().resolve()
        if not folder.is_dir():
            raise SettingsError(f"--models {where}: {folder} is no folder; give one with models, or '*' for the cache")
        models = list(_in_folder(folder, folder, DEPTH))
        place_name = f"the folder {folder}"
    if not models:
        raise SettingsError(
            f"--models {where}: {place_name} has no model: no .gguf file, and no folder with config.json"
        )
    if len(models) > MOST_MODELS:
        raise SettingsError(f"--models {where}: {place_name} has more than {MOST_MODELS} models; name a smaller folder")
    names = Counter(model.name for model in models)
    models = [replace(model, name=model.place) if names[model.name] > 1 and model.place else model for model in models]
    return sorted(models, key=lambda model: model.name)


def _in_folder(folder: Path, top: Path, depth: int) -> Iterator[LocalModel]:
    """A folder with a configuration is a model; else its GGUF files are, and its folders may have others."""
    try:
        entries = sorted(folder.iterdir())
    except OSError:
        return
    if any(entry.name == "config.json" for entry in entries) and any(
        entry.name.endswith(".safetensors") for entry in entries
    ):
        yield LocalModel(_name(folder.name), str(folder), place=_place(folder, top))
        return
    for name in first_parts(entry.name for entry in entries):
        file = folder / name
        if file.is_file():
            yield LocalModel(_name(model_stem(name)), str(file), place=_place(file.with_suffix(""), top))
    if depth:
        for entry in entries:
            if entry.is_dir() and not entry.name.startswith("."):
                yield from _in_folder(entry, top, depth - 1)


def _in_cache(cache: Path) -> Iterator[LocalModel]:
    """Repositories that are complete, each GGUF file of one as a model of its own."""
    for folder in sorted(cache.glob("models--*")):
        repository = folder.name.removeprefix("models--").replace("--", "/")
        names = first_parts({path.name for path in folder.glob("snapshots/*/*.gguf")})
        for gguf in names or [None]:
            if _is_complete(repository, gguf):
                name = repository if gguf is None or len(names) == 1 else _name(model_stem(gguf))
                yield LocalModel(_name(name), repository, gguf, f"{repository}/{gguf or ''}".rstrip("/"))


def _is_complete(repository: str, gguf: str | None) -> bool:
    try:
        return on_this_host(repository, gguf) is not None
    except (ModelFilesError, OSError, ValueError):
        return False


def _place(path: Path, top: Path) -> str:
    return _name(path.relative_to(top).as_posix())


def _name(text: str) -> str:
    """A name that clients can write: no white space and no braces."""
    return "".join("_" if character.isspace() or character in "{}" else character for character in text)


# The downloaded models of this user: listed and removed, in the cache of Hugging Face files and in Furrow's own.


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
    return tuple(sorted(models, key=lambda model: (-model.used_at, model.name)))


def _repository(path: Path) -> CachedModel:
    name = path.name.removeprefix(PREFIX).replace("--", "/")
    size = 0
    used_at = 0.0
    for file in path.rglob("*"):
        stat = file.lstat()  # a link of a snapshot is not its blob
        used_at = max(used_at, stat.st_mtime)
        if not file.is_symlink() and file.is_file():
            size += stat.st_size
            used_at = max(used_at, stat.st_atime)
    return CachedModel(name, path, size, used_at, _is_complete_repository(name, path))


def _is_complete_repository(name: str, path: Path) -> bool:
    """With any of its GGUF files, where it has several."""
    ggufs = {file.name for file in path.glob("snapshots/*/*.gguf")} or {None}
    return any(_is_complete(name, gguf) for gguf in ggufs)


def remove(model: CachedModel) -> None:
    """Delete its files. Processes that have them open keep their content. Raises OSError."""
    if model.path.is_dir():
        shutil.rmtree(model.path)
        shutil.rmtree(model.path.parent / ".locks" / model.path.name, ignore_errors=True)
    elif not cache_files.remove(cache_files.Entry("models", model.path, model.bytes, model.used_at)):
        raise PermissionError(f"{model.path} can't be deleted")
