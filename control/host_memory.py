"""The memory of this host: what its control group may have, and what is free of it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil

from control.control_group import GROUPS, OWN_GROUP, folders, memory_limit, number_in

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
