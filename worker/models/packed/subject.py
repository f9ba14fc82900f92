"""The circumstances that packed weights were made in: a change of any makes another file."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

import msgspec
import torch

from control import quantization
from worker.native.library import Threads
from worker.repository.files import ModelFiles
from worker.repository.fingerprint import fingerprint

ROOMS = ("families", "formats", "layers", "models", "native", "repository")
"""Rooms of the worker whose code decides what is kept of a checkpoint, and how it lies in memory."""
QUANTIZATION = Path(quantization.__file__)
"""The formats that `--quant` stands for."""
LONGEST_LABEL = 60


class Stamp(msgspec.Struct, frozen=True):
    """The state of a file of weights. `changed_ns` is the time of its last change by the kernel's clock, which no
    program can set: it shows a file that was changed in place with its size and modification time restored."""

    name: str
    bytes: int
    modified_ns: int
    changed_ns: int


class Subject(msgspec.Struct, frozen=True):
    """`fingerprint` covers config.json, dtype, quant and samples of each tensor; `library` is the name of the compiled
    library, which has the hash of its source, flags and processor."""

    label: str
    fingerprint: str
    files: tuple[Stamp, ...]
    quant: str | None
    rank: int
    world_size: int
    library: str
    code: str
    torch: str

    @property
    def name(self) -> str:
        """The name of its file in the cache."""
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
        return f"{self.label}-{self.quant or 'stored'}-rank{self.rank}of{self.world_size}-{digest}.weights"


def subject_of(
    files: ModelFiles,
    dtype: torch.dtype,
    quant: str | None,
    dequantize: bool,
    rank: int,
    world_size: int,
    threads: Threads,
) -> Subject:
    """Raises OSError if a file went away."""
    stamps = stamps_of(files)
    return Subject(
        label=_label(files),
        fingerprint=fingerprint(files, str(dtype), quant, dequantize),
        files=stamps,
        quant=quant,
        rank=rank,
        world_size=world_size,
        library=Path(threads.library._name).stem,
        code=_code(),
        torch=str(torch.__version__),
    )


def stamps_of(files: ModelFiles) -> tuple[Stamp, ...]:
    """Raises OSError if a file went away."""
    states = sorted((path.name, path.stat()) for path in files.weights)
    return tuple(Stamp(name, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for name, one in states)


def _label(files: ModelFiles) -> str:
    """A name that tells the file's model to a reader: that of its repository, folder or file."""
    first = files.weights[0]
    if first.parent.parent.name == "snapshots":  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        name = first.parent.parent.parent.name.removeprefix("models--").replace("--", "-")
    else:
        name = first.stem if first.suffix == ".gguf" else first.parent.name
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:LONGEST_LABEL] or "model"


@functools.cache
def _code() -> str:
    """The hash of the code of ROOMS, and of QUANTIZATION."""
    worker, digest = Path(__file__).parents[2], hashlib.sha256(QUANTIZATION.read_bytes())
    for room in ROOMS:
        for path in sorted((worker / room).rglob("*.py")):
            digest.update(path.relative_to(worker).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]
