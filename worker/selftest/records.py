"""Verdicts as files in the user's cache, one for each device kind, set of versions and set of shapes."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Literal

import msgspec

from control import cache as cache_files

KIND = "verdicts"
MOST_FILES = 64
"""Records that are kept; those that were not used for longest go first."""

Verdict = Literal["ok", "differs", "raised", "faulted", "timed out", "not available"]


class TrialResult(msgspec.Struct, frozen=True):
    """One kernel on one shape."""

    kernel: str
    shape: str
    dtype: str
    verdict: Verdict
    detail: str = ""
    seconds: float = 0.0
    """Of one call, without compilation; 0 if it was not measured."""
    gigabytes: float = 0.0
    """Bytes that a call reads and writes, in 10^9."""
    teraflops: float = 0.0
    """Floating point operations of a call, in 10^12."""

    @property
    def works(self) -> bool:
        """A kernel that is not available here is no reason to switch it off."""
        return self.verdict in ("ok", "not available")

    @property
    def reason(self) -> str:
        return f"{self.verdict} {self.detail}".strip()


class Circumstances(msgspec.Struct, frozen=True):
    """The circumstances that a verdict holds for: a change of any makes a new record."""

    device: str
    versions: dict[str, str]
    shapes: dict[str, str]

    @property
    def key(self) -> str:
        packed = msgspec.json.encode(self, order="sorted")
        name = "".join(letter if letter.isalnum() else "-" for letter in self.device.lower()).strip("-")
        return f"{name[:40]}-{hashlib.sha256(packed).hexdigest()[:16]}"


class Record(msgspec.Struct, frozen=True):
    subject: Circumstances
    results: list[TrialResult]

    def off(self) -> dict[str, str]:
        """Kernels that failed → the reason of the first failure."""
        failed: dict[str, str] = {}
        for result in self.results:
            if not result.works:
                failed.setdefault(result.kernel, result.reason)
        return failed


def read(subject: Circumstances) -> Record | None:
    """The record of `subject`; None if there is none, or it is damaged."""
    path = cache_files.folder(KIND) / f"{subject.key}.json"
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    if record.subject != subject:
        return None
    cache_files.mark_used(path)
    return record


def write(record: Record) -> None:
    """Keep a record, whole or not at all. Without a cache folder that can be written to, nothing is kept."""
    with contextlib.suppress(OSError):
        with cache_files.replacing(cache_files.made_folder(KIND) / f"{record.subject.key}.json") as file:
            file.write(msgspec.json.encode(record))
        for old in cache_files.entries(KIND)[MOST_FILES:]:
            cache_files.remove(old)
