"""One rank's counters: numbers in a file of shared memory, which outlives the rank and every agent."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
from bisect import bisect_left
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
import psutil

from control.engines import OWN
from worker.rank.series import CELLS, FORWARD_SECONDS, LAYOUT, PID, STEP_SECONDS, STEPS, WAIT_SECONDS, Series

FOLDER_VARIABLE = "FURROW_COUNTERS"
"""Names the folder of the counters of a host's ranks; where it is unset a rank counts in memory of its own."""
FOLDER_KEY = "counters"
"""The key under which a supervisor stores the folder for its next agent."""
SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "furrow-counters-"
HEAD_BYTES = 1024
CELL_BYTES = 8
FILE_BYTES = HEAD_BYTES + CELLS * CELL_BYTES
SUFFIX = ".counters"


class Labels(msgspec.Struct, frozen=True):
    """The rank that counts."""

    model: str
    replica: str
    rank: int
    layout: str = LAYOUT
    served_by: str = OWN
    """The engine that computes for it."""


class Counters:
    """Counts of one rank. One thread writes; each number is written at once, so that a reader needs no lock."""

    def __init__(self, cells: memoryview[float] | None = None) -> None:
        """`cells`: CELLS float64; own memory by default."""
        self._cells = cells if cells is not None else memoryview(bytearray(CELLS * CELL_BYTES)).cast("d")

    def add(self, series: Series, value: float = 1.0, at: int = 0) -> None:
        """Add to a counter; `at` is the place of its label's value."""
        self._cells[series.start + at] += value

    def set(self, series: Series, value: float) -> None:
        self._cells[series.start] = value

    def observe(self, series: Series, value: float, times: int = 1) -> None:
        """Count `times` observations of `value` in a histogram."""
        cells = self._cells
        start = series.start
        cells[start + bisect_left(series.bounds, value)] += times
        cells[start + len(series.bounds) + 1] += value * times

    def command(self, seconds: float, forward_s: float = 0.0, waited_s: float = 0.0) -> None:
        """Count a command that took `seconds`, with `forward_s` of forwards, `waited_s` of them for other ranks."""
        self.add(STEPS)
        self.add(STEP_SECONDS, seconds)
        self.add(FORWARD_SECONDS, forward_s)
        self.add(WAIT_SECONDS, waited_s)

    def read(self, series: Series) -> list[float]:
        """The series' cells."""
        return cast(list[float], self._cells[series.start : series.start + series.cells].tolist())

    @property
    def pid(self) -> int:
        """The process that counts, or counted last; 0 before the first."""
        return int(self._cells[PID])

    def begin(self, pid: int) -> None:
        """Count for the process `pid` from now on."""
        self._cells[PID] = pid


def share_folder(records: Mapping[str, Any]) -> Path:
    """Name the folder for the ranks that this agent starts: the one in the `records` of its supervisor, or a new one.

    It is in shared memory where there is such, and its name has the supervisor's pid. Those that nobody uses any more
    are deleted.
    """
    folder = Path(records.get(FOLDER_KEY) or "")
    if FOLDER_KEY not in records or not folder.is_dir():
        root = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
        for folder in root.glob(f"{_PREFIX}*"):
            if _is_stale(folder):
                shutil.rmtree(folder, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getppid()}-", dir=root))
    os.environ[FOLDER_VARIABLE] = str(folder)
    _use(folder)
    return folder


def forget_folder(folder: Path) -> None:
    """Delete the counters of this host, which stops, or could not start."""
    shutil.rmtree(folder, ignore_errors=True)


def forget_unused(records: Mapping[str, Any]) -> None:
    """Delete the folder of an agent that did not start, if it has made one: no rank and no later agent has it."""
    if (folder := os.environ.get(FOLDER_VARIABLE)) and FOLDER_KEY not in records:
        forget_folder(Path(folder))


def _use(folder: Path) -> None:
    """Keep others from deleting the folder until this process ends: theirs may not see its pid, in a container."""
    with suppress(OSError):
        fcntl.flock(os.open(folder, os.O_RDONLY | os.O_DIRECTORY), fcntl.LOCK_SH)


def _is_stale(folder: Path) -> bool:
    """True where no process uses the folder, and its supervisor has ended, or is this agent's and has not kept it."""
    pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
    if not pid.isdecimal():
        return False
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A process that is younger than the folder only has the number of its supervisor.
        return int(pid) == os.getppid() or psutil.Process(int(pid)).create_time() > os.fstat(lock).st_mtime + 1.0
    except (psutil.NoSuchProcess, OverflowError):
        return True
    except (OSError, psutil.Error):
        return False
    finally:
        os.close(lock)


def counters_of(labels: Labels) -> Counters:
    """The counters of a rank in this host's folder, going on from those of the process before it; in memory of its own
    where no folder is named or it can't be written. Counters are never a reason not to serve."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        return Counters()
    try:
        counters = _open(Path(folder), labels)
        _use(Path(folder))
    except (OSError, ValueError):
        return Counters()
    counters.begin(os.getpid())
    return counters


def read_counters(file: Path) -> tuple[Labels, Counters]:
    """The counters in a file. Raises OSError, or ValueError for one of another layout."""
    with file.open("r+b") as stream:
        if os.fstat(stream.fileno()).st_size != FILE_BYTES:
            raise ValueError(f"{file}: {os.fstat(stream.fileno()).st_size} bytes instead of {FILE_BYTES}")
        memory = memoryview(mmap.mmap(stream.fileno(), FILE_BYTES))
    labels = msgspec.json.decode(bytes(memory[:HEAD_BYTES]).rstrip(b"\0"), type=Labels)
    if labels.layout != LAYOUT:
        raise ValueError(f"{file}: layout {labels.layout} instead of {LAYOUT}")
    return labels, Counters(memory[HEAD_BYTES:].cast("d"))


def _open(folder: Path, labels: Labels) -> Counters:
    """Open the rank's file, or replace one that can't be read, or is of another engine."""
    place = {"model": labels.model, "replica": labels.replica, "rank": labels.rank, "layout": labels.layout}
    name = hashlib.sha256(msgspec.json.encode(place)).hexdigest()[:24]
    file = folder / f"{name}{SUFFIX}"
    try:
        before, counters = read_counters(file)
        if before == labels:
            return counters
    except (OSError, ValueError):
        pass
    head = msgspec.json.encode(labels).ljust(HEAD_BYTES, b"\0")
    if len(head) > HEAD_BYTES:
        raise ValueError(f"labels of {len(head)} bytes")
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as stream:
        stream.write(head + bytes(CELLS * CELL_BYTES))
    Path(stream.name).replace(file)
    return read_counters(file)[1]
