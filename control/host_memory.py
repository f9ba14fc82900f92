"""The memory of this host: what its control group may have, and what is free of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUP = Path("/proc/self/cgroup")


def memory_limit(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> int:
    """Bytes that this process's control group may use, 0 without a limit: the least of its own and those above it."""
    limits = [number_in(folder / name) for folder, name, _ in folders(groups, own_group)]
    return min((limit for limit in limits if limit), default=0)


def folders(groups: Path, own_group: Path) -> Iterator[tuple[Path, str, str]]:
    """The control group of this process and those above it, with the names of the files of limit and use; of version 1
    and of version 2."""
    with suppress(OSError, ValueError):
        for line in own_group.read_text(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            root = groups
            names = ("memory.max", "memory.current")
            if controllers:
                root = groups / "memory"
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            if not controllers or "memory" in controllers.split(","):
                own = root / path.lstrip("/")
                yield from ((folder, names[0], names[1]) for folder in (own, *own.parents))


def number_in(file: Path) -> int | None:
    """The number in a file; None where there is none, as for `max`."""
    try:
        return int(file.read_bytes())
    except (OSError, ValueError):
        return None


_INACTIVE = re.compile(rb"^(?:total_)?inactive_file (\d{1,18})$", re.MULTILINE)
RESERVED_BYTES = 256 * 2**20
"""Of a host's memory, for the supervisor, the agent, the standby, and an API process."""


def capacity(most: int | None = None, groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> int:
    """Bytes that the ranks of this host may have together: `most`, or all that the control group or the machine has
    but RESERVED_BYTES."""
    limit = memory_limit(groups, own_group)
    total = psutil.virtual_memory().total
    whole = min(limit, total) if limit else total
    return max(0, whole - RESERVED_BYTES) if most is None else min(most, whole)


def is_all(memory: int) -> bool:
    """True if a host plans with all that it has, and not with less that was named."""
    return memory >= capacity()


def available(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> int:
    """Bytes that this process may still take, of the machine's and of its control group's."""
    free = psutil.virtual_memory().available
    for folder, limit_name, used_name in folders(groups, own_group):
        limit = number_in(folder / limit_name)
        used = number_in(folder / used_name)
        if limit and used is not None:
            free = min(free, limit - used + _inactive(folder / "memory.stat"))
    return max(0, free)


def _inactive(file: Path) -> int:
    """Bytes of pages of files that the kernel drops first."""
    with suppress(OSError):
        if match := _INACTIVE.search(file.read_bytes()):
            return int(match[1])
    return 0
