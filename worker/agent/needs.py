"""Reads files of models beside the agent's loop, because a file system may hang for good: the memory that they need,
and the assets of those that no leader has loaded yet."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
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
from worker.repository import assets, quantized, source, validation
from worker.repository.external import external_model
from worker.repository.files import ModelFiles
from worker.repository.gguf import gate as gguf_gate

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


MOST_UNITS = 8
"""Into so many parts heads and widths are cut at most, for uneven shares."""


def uneven_need_of(spec: ModelSpec, files: ModelFiles) -> ModelNeed:
    """As `need_of`, with the need of ranks that have other shares than even ones, on CPUs. Raises as a load."""
    need = need_of(spec, files)
    units = _units_of(spec, files)
    if units <= spec.tp:
        return need
    ranks = [
        max(_needs_of_units(spec, files, own_units, units), key=lambda rank: rank.total)
        for own_units in range(1, units - spec.tp + 2)
    ]
    return msgspec.structs.replace(need, unit_ranks=ranks, units=units)


def _units_of(spec: ModelSpec, files: ModelFiles) -> int:
    """The most units, MOST_UNITS at most, that so many ranks could have evenly; 0 where shares must be even."""
    heads = set(validation.layer_kv_heads(files.config))
    for units in range(min(MOST_UNITS, *heads), spec.tp, -1):
        with suppress(FurrowError):
            shares = [1] * (spec.tp - 1) + [units - spec.tp + 1]
            validation.check_shares(files.config, shares, spec.tp, spec.quant)
            quantized.check(files.config, files.tensors, units, ["cpu"] * units)
            if files.gguf is not None:
                gguf_gate.check(files.gguf, files.config, msgspec.structs.replace(spec, tp=units), ["cpu"] * units)
            return units
    return 0


def _needs_of_units(spec: ModelSpec, files: ModelFiles, own_units: int, units: int) -> Iterator[RankNeed]:
    """Of a rank with so many units, wherever they begin: widths may be cut at other borders there."""
    for rank in range(spec.tp):
        behind = spec.tp - 1 - rank
        for first in range(rank, units - own_units - behind + 1):
            shares = (*_split(first, rank), own_units, *_split(units - own_units - first, behind))
            if sum(shares) == units:
                yield _rank_on(spec, files, rank, "cpu", shares)


def _split(units: int, ranks: int) -> list[int]:
    """The units of so many ranks together; which has how many does not matter to others."""
    return [1] * (ranks - 1) + [units - ranks + 1] if ranks else []


def _ranks_on(spec: ModelSpec, files: ModelFiles, devices: list[str]) -> list[RankNeed]:
    return [_rank_on(spec, files, rank, device) for rank, device in enumerate(devices)]


def _rank_on(spec: ModelSpec, files: ModelFiles, rank: int, device: str, shares: tuple[int, ...] = ()) -> RankNeed:
    from worker.models.need import rank_need  # only here: an agent does without its imports

    return rank_need(
        files,
        tp=spec.tp,
        rank=rank,
        dtype=spec.dtype,
        quant=spec.quant,
        dequantize=spec.dequantize,
        device=device,
        kv_tokens=spec.kv_tokens,
        kv_type=spec.kv_type,
        max_context=spec.max_context,
        shares=shares,
    )


def assets_of(spec: ModelSpec, place: Path) -> ModelAssets:
    """The assets that an API process needs of a model before it is loaded. Raises as a load."""
    if spec.engine != OWN:
        return external_model(place, spec).assets
    files = validation.inspect(place, spec.images)
    validation.check(files.config, spec.tp, spec.max_context, spec.quant)
    assets.check_tokenizer(files)
    read = assets.assets_of(files, spec)
    kv_tokens = spec.kv_tokens or read.context_length
    return msgspec.structs.replace(read, kv_tokens=kv_tokens, images=read.images if spec.images else None)


def print_need() -> None:
    """The process that `need_apart` starts: a specification and the folder or file of its model from standard input,
    its need to standard output."""
    die_with_parent()
    query = msgspec.json.decode(sys.stdin.buffer.read(), type=NeedQuery)
    place = Path(query.place)
    try:
        find = uneven_need_of if query.uneven else need_of
        need = find(query.spec, validation.inspect(place, query.spec.images))
    except (FurrowError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    sys.stdout.buffer.write(msgspec.json.encode(need))


class NeedQuery(msgspec.Struct, frozen=True, kw_only=True):
    spec: ModelSpec
    place: str
    uneven: bool = False


def need_apart(spec: ModelSpec, place: Path, *, uneven: bool = False) -> ModelNeed:
    """As `need_of` or `uneven_need_of`, in a process of its own: what it imports would stay with the agent. Raises
    ValueError with the reason."""
    query = msgspec.json.encode(NeedQuery(spec=spec, place=str(place), uneven=uneven))
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
        self.spec = spec
        self.place = place
        self._read = read
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
    """The result of `read` for each model at its latest revision, searched for once."""

    def __init__(self, read: Callable[[ModelSpec, Path], T]) -> None:
        self._read = read
        self._searches: dict[tuple[str, bool], _Search[T]] = {}

    def find(self, spec: ModelSpec, place: Path | None = None) -> tuple[bool, T | None]:
        """True if the search is over, and the result; None if it can't be known from files on this host. `place`: the
        files, where that is known by now. Call again until it is over."""
        key = spec.name, place is not None
        search = self._searches.get(key)
        if search is None or search.spec.revision != spec.revision:
            if sum(not (search.done or search.is_late) for search in self._searches.values()) >= AT_ONCE:
                return False, None
            search = self._searches[key] = _Search(spec, place, self._read)
        return search.done or search.is_late, search.result
