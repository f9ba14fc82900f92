"""The collection of a host's facts: disks, shared memory, compiler, kernels; no device is opened."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from control import host_memory
from control.cache import files as cache_files
from control.placement.host_facts import FilesHere, HostFacts, Machine, Space
from control.process import remembered_program
from control.redis.round_trip import RoundTrip
from control.version import VERSION
from worker.agent.devices import device_memory
from worker.native import compiled, host
from worker.native.builds import builds
from worker.repository.source import cache_folder
from worker.selftest import switches
from worker.selftest.records import KIND, Record

SHARED_MEMORY = Path("/dev/shm")
COMPILER_WITHIN_S = 10.0


def collect(trip: RoundTrip, files: dict[str, FilesHere], ranks: Mapping[str, str]) -> HostFacts:
    """The facts of this host; `files` are those of the models here, `ranks` the version of each rank."""
    return HostFacts(
        at_ms=trip.at_ms,
        version=VERSION,
        clock_ms=trip.skew_ms,
        round_trip_ms=round(trip.ms, 3),
        models=space(cache_folder(None, os.environ)[0]),
        cache=space(cache_files.folder("weights").parent),
        shared_memory=space(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None,
        compiler=compiler(),
        brought=next((path.stem for path in builds(host.SOURCE, for_this_processor=True)), ""),
        native=host.unavailable() or "",
        kernels_off=kernels_off(),
        files=files,
        machine=machine(),
        devices=device_memory(),
        program=" ".join(remembered_program()),
        old_ranks={name: version for name, version in ranks.items() if version != VERSION},
    )


def machine() -> Machine:
    """The processors and the memory of this host, as far as this process may use them."""
    return Machine(
        processors=len(os.sched_getaffinity(0)),
        load=round(os.getloadavg()[0], 2),
        memory=host_memory.capacity(),
        free=host_memory.available(),
    )


def space(folder: Path, statvfs: Callable[[Path], Any] = os.statvfs) -> Space | None:
    """Of the file system that holds the folder, or that will hold it once it is made; None where it does not answer."""
    try:
        there = next((one for one in (folder, *folder.parents) if one.exists()), Path("/"))
        system = statvfs(there)
    except OSError:
        return None
    total, free = system.f_blocks * system.f_frsize, system.f_bavail * system.f_frsize
    return Space(path=str(folder), total=total, free=free, unwritable=unwritable(there))


def unwritable(there: Path) -> str:
    """The reason why no file can be made in what is there of a folder's path; empty where one can."""
    if not there.is_dir():
        return f"{there} is no folder"
    if os.access(there, os.W_OK | os.X_OK):
        return ""
    read_only = os.statvfs(there).f_flag & os.ST_RDONLY
    return f"the file system of {there} is read-only" if read_only else f"the worker's user may not write in {there}"


def compiler() -> str:
    """The command and the first line of its version; empty where there is no compiler, or none that runs."""
    command = compiled.compiler_command()
    return _compiler(command) if command else ""


@functools.lru_cache(4)
def _compiler(command: str) -> str:
    try:
        said = subprocess.run(
            [command, "--version"], capture_output=True, text=True, timeout=COMPILER_WITHIN_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return f"{command}: {said.stdout.partition(chr(10))[0].strip()}"


def kernels_off() -> list[str]:
    """Kernels that FURROW_DISABLE names, and those that failed the latest trial of each device."""
    forced = [name.strip() for name in os.environ.get(switches.VARIABLE, "").split(",") if name.strip()]
    lines = [f"{name}: named in {switches.VARIABLE}" for name in forced]
    tried: set[str] = set()
    for entry in cache_files.entries(KIND):
        try:
            record = msgspec.json.decode(entry.path.read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            continue
        if record.subject.device not in tried:
            tried.add(record.subject.device)
            lines += [f"{name} on {record.subject.device}: {reason}" for name, reason in sorted(record.off().items())]
    return lines
