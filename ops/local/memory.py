"""The memory that the private server may use: a part of what this machine, or this process's control group, has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from control.errors import SettingsError
from control.sizes import parse_size

MIB = 1024 * 1024
LEAST = 16 * MIB
MOST = 16 * 1024 * MIB
"""Largest default."""
SHARE = 4
"""Divisor of the machine's memory; the models and the API processes need the rest."""

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


def default_memory() -> int:
    """Default maxmemory of the private server in bytes."""
    return max(LEAST, min(MOST, machine_memory() // SHARE))


def machine_memory(groups: Path = _GROUPS, own_group: Path = _OWN_GROUP) -> int:
    """Bytes that this process and its children may use: the machine's, or less in a limited control group."""
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *_group_limits(groups, own_group)])


def _group_limits(groups: Path, own_group: Path) -> Iterator[int]:
    """The limits of this process's control group and of those above it, of version 2 and of version 1."""
    try:
        lines = own_group.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _limits_upwards(groups, path, "memory.max")
        elif "memory" in controllers.split(","):
            yield from _limits_upwards(groups / "memory", path, "memory.limit_in_bytes")


def _limits_upwards(root: Path, path: str, name: str) -> Iterator[int]:
    # In a container the path may be the host's, of which only the root is visible here.
    folder = root / path.lstrip("/")
    for place in (folder, *folder.parents):
        if place.is_relative_to(root):
            try:
                text = (place / name).read_text().strip()
            except OSError:
                continue
            if text.isdigit():
                yield int(text)


def server_bytes(asked: str | None) -> int:
    """The private server's maxmemory, given or default. Raises SettingsError if it is too small to work with."""
    if asked is None:
        return default_memory()
    size = parse_size(asked)
    if size < LEAST:
        raise SettingsError(f"--redis-memory {asked} is too little: the private server needs {LEAST // MIB} MiB")
    return size
