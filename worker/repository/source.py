"""From a model's source, a folder or a Hugging Face repository, to a folder with its files.

A repository that is complete in the local cache is served without any network request.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from control.errors import HubUnreachable, ModelFilesAway, ModelFilesError
from worker.repository.files import INDEX, SINGLE, inspect

log = structlog.get_logger()

Tell = Callable[[str], None]
"""Gets the progress of a download as text."""
Fetch = Callable[[str, str, Path, Tell], Path]
"""Downloads: (repository, revision, cache, tell) → the folder with its files."""

ABANDONED_S = 3600.0
"""A file to which nothing was written for so long is no download any more: a connection that is silent ends sooner."""

OPTIONAL = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")


def resolve(
    source: str,
    revision: str = "main",
    cache: Path | None = None,
    tell: Tell = lambda text: None,
    fetch: Fetch | None = None,
) -> Path:
    """The folder with the files of `source`: itself a folder, or a repository in the cache or of the hub. `cache`
    overrides `cache_folder`. `tell` is called with the progress of a download, which `fetch` does, in this process by
    default. Raises ModelFilesError naming the file and the repository."""
    if Path(source).expanduser().is_dir():
        return Path(source).expanduser().resolve()
    if source.lower().endswith(".gguf"):
        raise ModelFilesError(f"{source} is a GGUF file, which is not supported. Name a folder with safetensors.")
    if source.startswith(("/", ".", "~")) or not _REPOSITORY.fullmatch(source):
        raise ModelFilesAway(
            f"Model folder {source} does not exist, and it is no Hugging Face repository id (org/name)."
        )
    place, reason = cache_folder(cache, os.environ)
    log.info("model cache", folder=str(place), reason=reason, action="find_model")
    snapshot = _cached(source, revision, place)
    if snapshot is not None:
        log.info("model in the cache", source=source, folder=str(snapshot), action="find_model")
        return snapshot
    return (fetch or download)(source, revision, place, tell)


def download(repository: str, revision: str, cache: Path, tell: Tell) -> Path:
    """The folder with the files of a repository, once they are all there. Raises ModelFilesError; HubUnreachable where
    another try may help."""
    _sweep(_folder(repository, cache) / "blobs")
    return _download(_Hub(repository, revision, cache, tell))


def cache_folder(explicit: Path | None, environment: Mapping[str, str]) -> tuple[Path, str]:
    """The folder of Hugging Face files, and the reason: explicit > HF_HUB_CACHE > HF_HOME/hub > the default. An empty
    variable counts as unset."""
    if explicit is not None:
        return explicit, "set explicitly"
    if hub := environment.get("HF_HUB_CACHE"):
        return Path(hub).expanduser(), "HF_HUB_CACHE"
    if home := environment.get("HF_HOME"):
        return Path(home).expanduser() / "hub", "HF_HOME"
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub", "default"


def _folder(repository: str, cache: Path) -> Path:
    return cache / f"models--{repository.replace('/', '--')}"


def _sweep(blobs: Path) -> None:
    """Remove beginnings of files that no download goes on with: those of processes that were killed."""
    for path in blobs.glob("*.incomplete"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                path.unlink()


def _cached(repository: str, revision: str, cache: Path) -> Path | None:
    """The snapshot of `revision`, if every file that is needed is there."""
    root = _folder(repository, cache)
    reference = root / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = root / "snapshots" / commit
    try:
        inspect(snapshot)
    except ModelFilesError as error:
        log.info("model incomplete in the cache", source=repository, error=str(error), action="find_model")
        return None
    return snapshot


@dataclass(frozen=True, slots=True)
class _Hub:
    """Where the files of one repository come from, and where they go."""

    repository: str
    revision: str
    cache: Path
    tell: Tell

    def fetch(self, name: str) -> Path | None:
        """One file, or None where the repository has none of that name."""
        # Imported here: it takes longer than all else in this module, and a local folder never needs it.
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        from worker.repository.download_progress import teller

        # It prints what it logs as well: once, in this process's form, is enough.
        logging.getLogger("huggingface_hub").handlers.clear()
        bar = teller(self.tell)
        try:
            path = hf_hub_download(self.repository, name, revision=self.revision, cache_dir=self.cache, tqdm_class=bar)
            return Path(path)
        except LocalEntryNotFoundError as error:  # the hub could not be reached; a subclass of the next
            kind: type[ModelFilesError] = ModelFilesAway if constants.HF_HUB_OFFLINE else HubUnreachable
            raise kind(
                f"{name} of {self.repository} is not in the cache {self.cache} and the hub can't be reached: {error}"
            ) from error
        except EntryNotFoundError:
            return None
        except Exception as error:
            kind = ModelFilesError if _is_final(error) else HubUnreachable
            raise kind(
                f"{name} of {self.repository} at {self.revision} could not be fetched ({type(error).__name__}): {error}"
            ) from error


def _is_final(error: Exception) -> bool:
    """True if another try would end alike: no such repository or revision, no access, no valid name."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(error, ValueError) or (status is not None and 400 <= status < 500 and status not in (408, 429))


def _download(hub: _Hub) -> Path:
    at = f"in repository {hub.repository} at {hub.revision}"
    config = hub.fetch("config.json")
    if config is None:
        raise ModelFilesError(f"config.json is missing {at}.")
    index = hub.fetch(INDEX)
    shards = [SINGLE] if index is None else _shards(index, hub.repository)
    for name in ("tokenizer.json", *shards):
        if hub.fetch(name) is None:
            raise ModelFilesError(f"{name} is missing {at}.")
    for name in OPTIONAL:
        hub.fetch(name)
    return config.parent


def _shards(index: Path, repository: str) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelFilesError(f"{INDEX} of repository {repository} can't be read: {error!r}") from error
