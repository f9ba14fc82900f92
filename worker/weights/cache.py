"""Packed weights kept between starts: found by what they were made of, read, written, and the oldest removed.

A file is a header, the structure of a module, and the memory of its arrays:

    magic (8 bytes) | length of the header (8) | CRC-32 of the header (4) | header (JSON) | structure | arrays

Arrays begin at borders of PAGE bytes and each at one of ALIGNMENT bytes within. Every byte but the gaps between
arrays is covered by a CRC-32. The structure is JSON with a list of classes, because a pickle calls what it names. The
key has the files' ctime too: an edited checkpoint could have its modification time restored.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray

from control import cache as cache_files
from control import quantization
from worker.collective.base import Link
from worker.native.library import Threads
from worker.native.memory import large_pages, mapped, move_to_large_pages
from worker.weights.structure import Unknown, dtype_of, put_together, taken_apart

log = structlog.get_logger()

KIND = "weights"
LEAST_BYTES = 32 * 2**20
"""Size of packed weights from which on reading them saves time worth a file."""
SPARE_BYTES = 2**30
"""Bytes of the disk that are left free."""
NICENESS = 10
MOVE_AFTER_S = 2.0
MOVE_PAUSE_S = 0.02
ROOMS = ("families", "models", "native", "repository", "weights")
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
    shares: tuple[int, ...]
    """By rank, where they are uneven."""
    code: str

    @property
    def name(self) -> str:
        """The name of its file in the cache."""
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:16]
        return f"{self.label}-{self.quant or 'stored'}-rank{self.rank}of{self.world_size}-{digest}.weights"


def subject_of(
    weights: Sequence[Path],
    fingerprint: str,
    quant: str | None,
    rank: int,
    world_size: int,
    threads: Threads,
    shares: tuple[int, ...] = (),
) -> Subject:
    """`weights` are the model's files, `fingerprint` is that of what is made of them. Raises OSError if a file went
    away."""
    return Subject(
        label=_label(weights[0]),
        fingerprint=fingerprint,
        files=stamps_of(weights),
        quant=quant,
        rank=rank,
        world_size=world_size,
        library=Path(threads.library._name).stem,
        shares=shares,
        code=_code(),
    )


def stamps_of(weights: Sequence[Path]) -> tuple[Stamp, ...]:
    """Raises OSError if a file went away."""
    states = sorted((path.name, path.stat()) for path in weights)
    return tuple(Stamp(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states)


def _label(first: Path) -> str:
    """A name that tells the file's model to a reader: that of its repository, folder or file."""
    if first.parent.parent.name == "snapshots":  # the hub's cache: models--OWNER--NAME/snapshots/COMMIT
        name = first.parent.parent.parent.name.removeprefix("models--").replace("--", "-")
    else:
        name = first.stem if first.suffix == ".gguf" else first.parent.name
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-.")[:LONGEST_LABEL] or "model"


@functools.cache
def _code() -> str:
    """The hash of the code of ROOMS, and of QUANTIZATION."""
    worker = Path(__file__).parents[1]
    digest = hashlib.sha256(QUANTIZATION.read_bytes())
    for room in ROOMS:
        for path in sorted((worker / room).rglob("*.py")):
            digest.update(path.relative_to(worker).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:24]


MAGIC = b"FURROW\x00\x02"
_HEAD = struct.Struct("<8sQI")
LONGEST_HEADER = 2**30
PAGE = 4096
ALIGNMENT = 64
PIECE = 4 * 2**20
"""Bytes that are read and checked at once: they are still in the processor's cache when they are checked."""


class Damaged(Exception):
    """A file does not hold what its name says; the message says how that was seen."""


class StoredArray(msgspec.Struct, frozen=True):
    """An array: its bytes begin `offset` bytes behind the first one. `sums` are CRC-32s of its pieces."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    sums: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * dtype_of(self.dtype).itemsize


class WeightsHeader(msgspec.Struct, frozen=True):
    subject: Subject
    structure_bytes: int
    structure_sum: int
    array_bytes: int
    arrays: tuple[StoredArray, ...]


def file_bytes(structure: bytes, arrays: list[NDArray[Any]]) -> int:
    """About the size of a file."""
    return len(structure) + sum(array.nbytes + ALIGNMENT for array in arrays) + PAGE


def write_file(file: IO[bytes], subject: Subject, structure: bytes, arrays: list[NDArray[Any]]) -> None:
    """Raises OSError."""
    stored = list[StoredArray]()
    end = 0
    for array in arrays:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        sums = tuple(zlib.crc32(piece) for piece in _pieces(array))
        stored.append(StoredArray(array.dtype.name, array.shape, begin, sums))
        end = begin + array.nbytes
    header = msgspec.json.encode(WeightsHeader(subject, len(structure), zlib.crc32(structure), end, tuple(stored)))
    file.write(_HEAD.pack(MAGIC, len(header), zlib.crc32(header)) + header + structure)
    begin = _border(len(header), len(structure))
    for entry, array in zip(stored, arrays, strict=True):
        file.seek(begin + entry.offset)
        for piece in _pieces(array):
            file.write(piece)
    file.truncate(begin + end)


def read_file(
    path: Path, subject: Subject, tell: Callable[[float], None], threads: int
) -> tuple[bytes, list[NDArray[Any]]]:
    """The structure, and the arrays, which share one piece of memory. `tell` is called with the share that was read.
    Raises OSError, and Damaged for a file that is not `subject`'s or not whole."""
    with path.open("rb") as file:
        header, length = _header(file)
        if header.subject != subject:
            raise Damaged("it holds another model's weights")
        begin = _border(length, header.structure_bytes)
        size = os.fstat(file.fileno()).st_size
        if size != begin + header.array_bytes:
            raise Damaged(f"it has {size} bytes, and {begin + header.array_bytes} are announced")
        _check_places(header)
        structure = file.read(header.structure_bytes)
        if len(structure) != header.structure_bytes or zlib.crc32(structure) != header.structure_sum:
            raise Damaged("the checksum of its structure is wrong")
        memory = _memory(file.fileno(), begin, header.array_bytes)
        is_mapped = memory is not None
        if memory is None:
            memory = large_pages(header.array_bytes)
        _check_all(file.fileno(), begin, header, memory, tell, threads, read=not is_mapped)
    if is_mapped:
        threading.Thread(target=_move, args=(memory,), name="move-weights", daemon=True).start()
    return structure, [_array(array, memory) for array in header.arrays]


def _memory(file: int, begin: int, size: int) -> NDArray[np.uint8] | None:
    """The arrays as the page cache has them; None where they can't be mapped, or not be moved later."""
    if sys.platform != "linux" or not size:
        return None
    try:
        return mapped(file, begin, size)
    except OSError as error:
        log.info("packed weights are read, not mapped", error=str(error), action="read_weights")
        return None


def _move(memory: NDArray[np.uint8]) -> None:
    """Steps over large pages are faster than over a mapped file, and the page cache may drop that. The move begins
    once the first answers are there."""
    os.nice(NICENESS)  # of this thread
    time.sleep(MOVE_AFTER_S)
    begun = time.monotonic()
    try:
        move_to_large_pages(memory, lambda: time.sleep(MOVE_PAUSE_S))
    except OSError as error:
        log.warning("packed weights stay mapped", error=str(error), action="move_weights")
        return
    seconds = round(time.monotonic() - begun, 2)
    log.info("packed weights moved to large pages", mib=len(memory) >> 20, seconds=seconds, action="move_weights")


def _header(file: BinaryIO) -> tuple[WeightsHeader, int]:
    head = file.read(_HEAD.size)
    if len(head) < _HEAD.size:
        raise Damaged(f"it has {len(head)} bytes")
    magic, length, expected = _HEAD.unpack(head)
    if magic != MAGIC or length > LONGEST_HEADER:
        raise Damaged("it is no file of packed weights, or of another version")
    data = file.read(length)
    if len(data) != length or zlib.crc32(data) != expected:
        raise Damaged("the checksum of its header is wrong")
    try:
        return msgspec.json.decode(data, type=WeightsHeader), length
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"its header can't be read: {error}") from error


def _check_places(header: WeightsHeader) -> None:
    for array in header.arrays:
        inside = (
            array.offset >= 0 and array.offset + array.bytes <= header.array_bytes and array.offset % ALIGNMENT == 0
        )
        if not inside or len(array.sums) != -(-array.bytes // PIECE) or min(array.shape, default=0) < 0:
            raise Damaged("the place of an array is wrong")


def _check_all(
    file: int,
    begin: int,
    header: WeightsHeader,
    memory: NDArray[np.uint8],
    tell: Callable[[float], None],
    threads: int,
    *,
    read: bool,
) -> None:
    """Check every piece in `memory`, into which it is `read` before, by several threads: both leave the interpreter
    free."""
    room = memory.data

    def fill(start: int, stop: int, expected: int) -> int:
        place = room[start:stop]
        at = 0 if read else len(place)
        while at < len(place):
            count = os.preadv(file, [place[at:]], begin + start + at)
            if not count:
                raise Damaged("it is shorter than announced")
            at += count
        if zlib.crc32(place) != expected:
            raise Damaged(f"the checksum of the {stop - start} bytes from {begin + start} on is wrong")
        return stop - start

    read_bytes = 0
    with ThreadPoolExecutor(max(1, threads), "read-weights") as pool:
        parts = [pool.submit(fill, *piece) for array in header.arrays for piece in _places(array)]
        try:
            for part in as_completed(parts):
                read_bytes += part.result()
                tell(read_bytes / max(1, header.array_bytes))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _places(array: StoredArray) -> Iterator[tuple[int, int, int]]:
    for index, expected in enumerate(array.sums):
        start = array.offset + index * PIECE
        yield start, min(start + PIECE, array.offset + array.bytes), expected


def _pieces(array: NDArray[Any]) -> Iterator[memoryview]:
    if array.nbytes:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        for start in range(0, len(data), PIECE):
            yield data[start : start + PIECE].data


def _array(array: StoredArray, memory: NDArray[np.uint8]) -> NDArray[Any]:
    return memory[array.offset : array.offset + array.bytes].view(dtype_of(array.dtype)).reshape(array.shape)


def _border(header: int, structure: int) -> int:
    """The place of the first array in a file."""
    return -(-(_HEAD.size + header + structure) // PAGE) * PAGE


class WeightCache:
    """The files of one host's user, at most `limit` bytes of them; 0 keeps and reads none."""

    def __init__(self, limit: int, least: int = LEAST_BYTES) -> None:
        self._limit = limit
        self._least = least
        self.writing: threading.Thread | None = None
        """The thread that writes what was kept last."""

    @property
    def on(self) -> bool:
        return self._limit > 0

    def read(self, subject: Subject, threads: Threads, link: Link, tell: Callable[[float], None]) -> Any | None:
        """The contents that `keep` was given for `subject`; None if there are none. A damaged file is removed."""
        path = cache_files.folder(KIND) / subject.name
        begun = time.monotonic()
        try:
            structure, arrays = read_file(path, subject, tell, threads.count)
            contents = put_together(structure, arrays, threads, link)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("packed weights not read", file=str(path), error=str(error), action="read_weights")
            return None
        except (Damaged, Unknown) as error:
            log.warning(
                "packed weights are damaged",
                file=str(path),
                reason=str(error),
                remedy="the checkpoint is read, and the file is written again",
                action="read_weights",
            )
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        cache_files.mark_used(path)
        seconds = round(time.monotonic() - begun, 2)
        log.info("packed weights read from the cache", file=subject.name, seconds=seconds, action="read_weights")
        return contents

    def keep(self, subject: Subject, weights: Sequence[Path], contents: Any) -> None:
        """Write `contents`, which no one may change from now on, in a thread of lower priority. Nothing is kept where a
        file of `weights` was changed since `subject` was taken. Raises nothing."""
        try:
            structure, arrays = taken_apart(contents)
        except (Unknown, TypeError, ValueError, AttributeError) as error:
            log.warning("packed weights not kept", reason=str(error), action="keep_weights")
            return
        if sum(array.nbytes for array in arrays) < self._least:
            return

        def work() -> None:
            if sys.platform == "linux":
                os.nice(NICENESS)  # of this thread
            try:
                if stamps_of(weights) == subject.files:
                    self._write(subject, structure, arrays)
            except OSError as error:
                log.warning("packed weights not kept", reason=str(error), action="keep_weights")

        self.writing = threading.Thread(target=work, name="keep-weights", daemon=True)
        self.writing.start()

    def _write(self, subject: Subject, structure: bytes, arrays: list[NDArray[Any]]) -> None:
        place = cache_files.made_folder(KIND)
        size = file_bytes(structure, arrays)
        if (place / subject.name).exists():  # another process was faster
            return
        if not cache_files.make_room(KIND, size, self._limit, SPARE_BYTES):
            log.warning(
                "packed weights not kept",
                reason=f"{size / 2**30:.1f} GiB fit neither the limit of {self._limit / 2**30:.1f} GiB nor the disk",
                remedy="raise FURROW_WEIGHT_CACHE, or free disk space",
                action="keep_weights",
            )
            return
        begun = time.monotonic()
        with cache_files.replacing(place / subject.name) as file:
            write_file(file, subject, structure, arrays)
        seconds = round(time.monotonic() - begun, 2)
        log.info("packed weights kept", file=subject.name, mib=size >> 20, seconds=seconds, action="keep_weights")
