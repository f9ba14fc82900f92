"""From a model's source, a folder or a Hugging Face repository, to a folder with its files. Torch-free.

A repository that is complete in the local cache is served from there without a question to the network.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

from control.errors import ModelFilesError
from worker.models.files import INDEX, SINGLE, inspect

log = logging.getLogger(__name__)

OPTIONAL = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")


def resolve(source: str, revision: str = "main", cache: Path | None = None) -> Path:
    """The folder with the files of `source`; raises ModelFilesError naming the file and the repository.

    A folder is taken as it is. Otherwise the cache is looked at, then the hub is asked; `cache` overrides the cache's
    place, see `cache_folder`.
    """
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser().resolve()
    if source.lower().endswith(".gguf"):
        raise ModelFilesError(f"{source} is a GGUF file, which is not supported. Name a folder with safetensors.")
    if source.startswith(("/", ".", "~")) or not _REPOSITORY.fullmatch(source):
        raise ModelFilesError(
            f"Model folder {source} does not exist, and it is no Hugging Face repository id (org/name)."
        )
    place, reason = cache_folder(cache, os.environ)
    log.info("model cache %s (%s)", place, reason)
    snapshot = _cached(source, revision, place)
    if snapshot is not None:
        log.info("model %s is in the cache: %s", source, snapshot)
        return snapshot
    return _download(source, revision, place)


def cache_folder(explicit: Path | None, environment: Mapping[str, str]) -> tuple[Path, str]:
    """Where Hugging Face files are kept, and why: explicit > HF_HUB_CACHE > HF_HOME/hub > the default.

    An empty variable counts as unset.
    """
    if explicit is not None:
        return explicit, "set explicitly"
    if hub := environment.get("HF_HUB_CACHE"):
        return Path(hub).expanduser(), "HF_HUB_CACHE"
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub", "HF_HOME"
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub", "default"


def _cached(repository: str, revision: str, cache: Path) -> Path | None:
    """The snapshot of `revision`, if every file that is needed is there."""
    root = cache / f"models--{repository.replace('/', '--')}"
    reference = root / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = root / "snapshots" / commit
    try:
        inspect(snapshot)
    except ModelFilesError as error:
        log.info("model %s is not complete in the cache: %s", repository, error)
        return None
    return snapshot


def _download(repository: str, revision: str, cache: Path) -> Path:
    config = _fetch(repository, "config.json", revision, cache)
    if config is None:
        raise ModelFilesError(f"config.json is missing in repository {repository} at {revision}.")
    index = _fetch(repository, INDEX, revision, cache)
    shards = [SINGLE] if index is None else _shards(index, repository)
    for name in ("tokenizer.json", *shards):
        if _fetch(repository, name, revision, cache) is None:
            raise ModelFilesError(f"{name} is missing in repository {repository} at {revision}.")
    for name in OPTIONAL:
        _fetch(repository, name, revision, cache)
    return config.parent


def _shards(index: Path, repository: str) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFilesError(f"{INDEX} of repository {repository} can't be read: {error!r}") from error


def _fetch(repository: str, name: str, revision: str, cache: Path) -> Path | None:
    """One file of the hub, or None where the repository has none of that name."""
    # Imported here: it takes longer than all else in this module, and a local folder never needs it.
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    # It prints what it logs as well: once, in this process's form, is enough.
    logging.getLogger("huggingface_hub").handlers.clear()
    try:
        return Path(hf_hub_download(repository, name, revision=revision, cache_dir=cache))
    except LocalEntryNotFoundError as error:  # the hub could not be reached; a subclass of the next
        raise ModelFilesError(
            f"{name} of {repository} is not in the cache {cache} and the hub can't be reached: {error}"
        ) from error
    except EntryNotFoundError:
        return None
    except Exception as error:
        raise ModelFilesError(
            f"{name} of {repository} at {revision} could not be fetched ({type(error).__name__}): {error}"
        ) from error
