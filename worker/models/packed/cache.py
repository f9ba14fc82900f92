"""Packed weights kept between starts: found by what they were made of, read, written, and the oldest removed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import structlog
from torch import Tensor

from control.cache import files as cache_files
from worker.models.layers.parallel import Link
from worker.models.packed import file as stored_file
from worker.models.packed.file import Damaged
from worker.models.packed.structure import Unknown, put_together, taken_apart
from worker.models.packed.subject import Subject, stamps_of
from worker.native.library import Threads
from worker.repository.files import ModelFiles

log = structlog.get_logger()

KIND = "weights"
LEAST_BYTES = 32 * 2**20
"""Size of packed weights from which on reading them saves time worth a file."""
SPARE_BYTES = 2**30
"""Bytes of the disk that are left free."""
NICENESS = 10
PREFIX = "write-"


class WeightCache:
    """The files of one host's user, at most `limit` bytes of them; 0 keeps and reads none."""

    def __init__(self, limit: int, least: int = LEAST_BYTES) -> None:
        self._limit, self._least = limit, least
        self.writing: threading.Thread | None = None
        """The thread that writes what was kept last."""

    @property
    def on(self) -> bool:
        return self._limit > 0

    def read(self, subject: Subject, threads: Threads, link: Link, tell: Callable[[float], None]) -> Any | None:
        """The contents that `keep` was given for `subject`; None if there are none. A damaged file is removed."""
        path, begun = cache_files.folder(KIND) / subject.name, time.monotonic()
        try:
            structure, tensors = stored_file.read(path, subject, tell, threads.count)
            found = put_together(structure, tensors, threads, link)
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
        return found

    def keep(self, subject: Subject, files: ModelFiles, contents: Any) -> None:
        """Write `contents`, which no one may change from now on, in a thread of lower priority. Files that were changed
        since `subject` was taken are not kept. Raises nothing."""
        try:
            structure, tensors = taken_apart(contents)
        except (Unknown, TypeError, ValueError, AttributeError) as error:
            log.warning("packed weights not kept", reason=str(error), action="keep_weights")
            return
        if sum(tensor.nbytes for tensor in tensors) < self._least:
            return

        def work() -> None:
            if sys.platform == "linux":
                os.nice(NICENESS)  # of this thread
            try:
                if stamps_of(files) == subject.files:
                    self._write(subject, structure, tensors)
            except OSError as error:
                log.warning("packed weights not kept", reason=str(error), action="keep_weights")

        self.writing = threading.Thread(target=work, name="keep-weights", daemon=True)
        self.writing.start()

    def _write(self, subject: Subject, structure: bytes, tensors: list[Tensor]) -> None:
        place, size = cache_files.folder(KIND), stored_file.file_bytes(structure, tensors)
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(place)
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
        with tempfile.NamedTemporaryFile(dir=place, prefix=PREFIX, delete=False) as fresh:
            try:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(fresh, fcntl.LOCK_EX)
                stored_file.write(cast("Any", fresh), subject, structure, tensors)
                fresh.flush()
                Path(fresh.name).replace(place / subject.name)  # whole or not at all, however many write it
            except BaseException:
                Path(fresh.name).unlink(missing_ok=True)
                raise
        seconds = round(time.monotonic() - begun, 2)
        log.info("packed weights kept", file=subject.name, mib=size >> 20, seconds=seconds, action="keep_weights")


def _remove_abandoned(place: Path) -> None:
    """Remove files that a process left unfinished: the lock of a file goes with the process that wrote it."""
    for path in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
