"""What is read of the files of models beside the agent's loop, because a file system may hang for good: the memory that
they need, and the assets of those that no leader has loaded yet."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import structlog

from control.engines import OWN
from control.errors import FurrowError
from control.messages import ModelAssets, ModelSpec
from control.placement.need import ModelNeed, RankNeed
from control.process import child_environment, die_with_parent, python_command
from worker.repository import assets, source, validation
from worker.repository.external import external_model
from worker.repository.files import ModelFiles

log = structlog.get_logger()

PATIENCE_S = 5.0
"""Headers are read in less; a model is placed without its need where they can't be."""


def need_of(spec: ModelSpec, files: ModelFiles) -> ModelNeed:
    """Of each rank of a replica as the specification wants it; on CPUs and on GPUs where it names no devices. Raises as
    a load."""
    ranks = _ranks_on(spec, files, spec.devices or ["cpu"] * spec.tp)
    gpu_ranks = list[RankNeed]()
    if spec.devices and "cpu" not in spec.devices:
        gpu_ranks = ranks
    elif not spec.devices:
        with suppress(FurrowError, ValueError):  # what can't be served on a GPU
            gpu_ranks = _ranks_on(spec, files, ["cuda:0"] * spec.tp)
    context = validation.context_length(files.config)
    return ModelNeed(
        revision=spec.revision,
        context=min(context, spec.max_context or context),
        ranks=ranks,
        gpu_ranks=gpu_ranks,
    )


def _ranks_on(spec: ModelSpec, files: ModelFiles, devices: list[str]) -> list[RankNeed]:
    from worker.models.need import rank_need  # only here: an agent does without its imports

    return [
        rank_need(
            files,
            tp=spec.tp,
            rank=rank,
            dtype=spec.dtype,
            quant=spec.quant,
            dequantize=spec.dequantize,
            device=device,
            kv_tokens=spec.kv_tokens,
            max_context=spec.max_context,
        )
        for rank, device in enumerate(devices)
    ]


def assets_of(spec: ModelSpec, place: Path) -> ModelAssets:
    """What an API process needs of a model before it is loaded. Raises as a load."""
    if spec.engine != OWN:
        return external_model(place, spec).assets
    files = validation.inspect(place, spec.images)
    validation.check(files.config, spec.tp, spec.max_context, spec.quant)
    assets.check_tokenizer(files)
    read = assets.read_assets(files, spec.max_context)
    kv_tokens = spec.kv_tokens or read.context_length
    return msgspec.structs.replace(read, kv_tokens=kv_tokens, images=read.images if spec.images else None)


def print_need() -> None:
    """The process that `need_apart` starts: a specification and the folder or file of its model from standard input,
    its need to standard output."""
    die_with_parent()
    query = msgspec.json.decode(sys.stdin.buffer.read(), type=NeedQuery)
    place = Path(query.place)
    try:
        need = need_of(query.spec, validation.inspect(place, query.spec.images))
    except (FurrowError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    sys.stdout.buffer.write(msgspec.json.encode(need))


class NeedQuery(msgspec.Struct, frozen=True, kw_only=True):
    spec: ModelSpec
    place: str


def need_apart(spec: ModelSpec, place: Path) -> ModelNeed:
    """As `need_of`, in a process of its own: what it imports would stay with the agent. Raises ValueError with the
    reason."""
    query = msgspec.json.encode(NeedQuery(spec=spec, place=str(place)))
    command = python_command("worker", "need")
    ended = subprocess.run(
        command, input=query, capture_output=True, timeout=LIMIT_S, env=child_environment(), check=False
    )
    if ended.returncode:
        raise ValueError(ended.stderr.decode(errors="replace").strip()[-500:])
    return msgspec.json.decode(ended.stdout, type=ModelNeed)


T = TypeVar("T")


LIMIT_S = 60.0
"""Of a process that finds a need; a file system may hang for good."""
AT_ONCE = 2
"""Searches that run together: each takes a processor."""


class _Search(Generic[T]):
    def __init__(self, spec: ModelSpec, place: Path | None, read: Callable[[ModelSpec, Path], T]) -> None:
        self.spec, self.place, self._read = spec, place, read
        self.result: T | None = None
        self.done = False
        self.late_at = time.monotonic() + PATIENCE_S
        threading.Thread(target=self._run, name="read files", daemon=True).start()

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.late_at

    def _run(self) -> None:
        try:
            place = self.place or source.on_this_host(self.spec.source, self.spec.gguf)
            if place is not None:
                self.result = self._read(self.spec, place)
        except (FurrowError, OSError, ValueError, subprocess.TimeoutExpired) as error:  # a load says it again
            log.info("files can't be read", model=self.spec.name, error=str(error), action="read_files")
        except Exception:
            log.exception("files can't be read", model=self.spec.name, action="read_files")
        finally:
            self.done = True


class Finder(Generic[T]):
    """What `read` gives of each model at its latest revision, searched for once."""

    def __init__(self, read: Callable[[ModelSpec, Path], T]) -> None:
        self._read = read
        self._searches: dict[tuple[str, bool], _Search[T]] = {}

    def find(self, spec: ModelSpec, place: Path | None = None) -> tuple[bool, T | None]:
        """Whether the search is over, and the result; None where it can't be known from files on this host. `place`:
        the files, where that is known by now. Call again until it is over."""
        key = spec.name, place is not None
        search = self._searches.get(key)
        if search is None or search.spec.revision != spec.revision:
            if sum(not (one.done or one.is_late) for one in self._searches.values()) >= AT_ONCE:
                return False, None
            search = self._searches[key] = _Search(spec, place, self._read)
        return search.done or search.is_late, search.result
