"""The memory that the private server may use: a part of what this machine, or this process's control group, has."""

from __future__ import annotations

import os
from pathlib import Path

from control.control_group import GROUPS, OWN_GROUP, memory_limit
from control.errors import SettingsError
from control.sizes import parse_size

MIB = 1024 * 1024
LEAST = 16 * MIB
MOST = 16 * 1024 * MIB
"""Largest default."""
SHARE = 4
"""Divisor of the machine's memory; the models and the API processes need the rest."""


def default_memory() -> int:
    """Default maxmemory of the private server in bytes."""
    return max(LEAST, min(MOST, machine_memory() // SHARE))


def machine_memory(groups: Path = GROUPS, own_group: Path = OWN_GROUP) -> int:
    """Bytes that this process and its children may use: the machine's, or less in a limited control group."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, memory_limit(groups, own_group) or machine)


def server_bytes(size_text: str | None) -> int:
    """The private server's maxmemory, given or default. Raises SettingsError if it is too small to work with."""
    if size_text is None:
        return default_memory()
    size = parse_size(size_text)
    if size < LEAST:
        raise SettingsError(f"--redis-memory {size_text} is too little: the private server needs {LEAST // MIB} MiB")
    return size
