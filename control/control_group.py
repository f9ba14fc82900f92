"""The memory that this process's control group may use, in version 1 and in version 2 of control groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
