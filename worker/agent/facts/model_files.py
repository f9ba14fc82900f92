"""The fingerprints of the farm's models as this host has their files, computed once for each state of the files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from control.errors import FurrowError
from control.messages import ModelSpec
from control.placement.host_facts import FilesHere
from worker.repository.files import inspect
from worker.repository.fingerprint import fingerprints
from worker.repository.source import on_this_host

Signature = tuple[tuple[str, int, int], ...]
"""Path, size and time of change of each file."""
_Key = tuple[str, str | None, bool]


class ModelFingerprints:
    """Reads a model's files again only where they changed."""

    def __init__(self) -> None:
        self._known: dict[_Key, tuple[Path, Signature, FilesHere]] = {}

    def of(self, specs: Iterable[ModelSpec]) -> dict[str, FilesHere]:
        """By model; one whose files are still to be downloaded is left out."""
        keys = {spec.name: (spec.source, spec.gguf, spec.images) for spec in specs if not spec.unload}
        self._known = {key: entry for key, entry in self._known.items() if key in keys.values()}
        return {name: here for name, key in keys.items() if (here := self._one(key)) is not None}

    def _one(self, key: _Key) -> FilesHere | None:
        source, gguf, images = key
        try:
            if (entry := self._known.get(key)) is not None and entry[1] == _signature(entry[0]):
                return entry[2]
            place = on_this_host(source, gguf)
            if place is None:
                return None
            signature = _signature(place)  # before the files are read: a later change is seen in the next turn
            here = FilesHere(fingerprint=fingerprints(inspect(place, images), "auto").stored)
            self._known[key] = place, signature, here
            return here
        except (FurrowError, OSError, ValueError) as error:
            return FilesHere(error=str(error))


def _signature(place: Path) -> Signature:
    """Of a GGUF file, or of the files of a folder."""
    paths = sorted(place.iterdir()) if place.is_dir() else [place]
    states = [(str(path), path.stat()) for path in paths]
    return tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in states)
