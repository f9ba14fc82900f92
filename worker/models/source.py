"""From a model's source, a folder or a Hugging Face repository, to a folder with its files. Torch-free.

A repository that is complete in the local cache is served from there without a question to the network.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from control.errors import ModelFilesError
from worker.models.files import INDEX, SINGLE, inspect

log = logging.getLogger(__name__)

OPTIONAL = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")


def resolve(
    source: str, revision: str = "main", cache: Path | None = None, tell: Callable[[str], None] = lambda text: None
) -> Path:
    """The folder with the files of `source`; raises ModelFilesError naming the file and the repository.

    A folder is taken as it is. Otherwise the cache is looked at, then the hub is asked; `cache` overrides the cache's
    place, see `cache_folder`. `tell` hears how far a download is.
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
    return _download(_Hub(source, revision, place, tell))


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


@dataclass(frozen=True, slots=True)
class _Hub:
    """Where the files of one repository come from, and where they go."""

    repository: str
    revision: str
    cache: Path
    tell: Callable[[str], None]

    def fetch(self, name: str) -> Path | None:
        """One file, or None where the repository has none of that name."""
        # Imported here: it takes longer than all else in this module, and a local folder never needs it.
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        from worker.models.download_progress import teller

        # It prints what it logs as well: once, in this process's form, is enough.
        logging.getLogger("huggingface_hub").handlers.clear()
        bar = teller(self.tell)
        try:
            path = hf_hub_download(self.repository, name, revision=self.revision, cache_dir=self.cache, tqdm_class=bar)
            return Path(path)
        except LocalEntryNotFoundError as error:  # the hub could not be reached; a subclass of the next
            raise ModelFilesError(
                f"{name} of {self.repository} is not in the cache {self.cache} and the hub can't be reached: {error}"
            ) from error
        except EntryNotFoundError:
            return None
        except Exception as error:
            raise ModelFilesError(
                f"{name} of {self.repository} at {self.revision} could not be fetched ({type(error).__name__}): {error}"
            ) from error


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
