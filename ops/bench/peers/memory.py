"""How much memory the processes that are measured took at most."""

from __future__ import annotations

from pathlib import Path

import psutil

MIB = 2**20


def peak_of_children() -> float:
    """MiB of this process's descendants together. Call it before they end.

    A page that several share counts once (PSS); the peak of each is its PSS now and by how much it has shrunk since it
    was largest, as the kernel remembers that (VmHWM). So nothing has to watch while times are taken. Raises ValueError
    where there are none.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            now = process.memory_full_info()
            found.append(now.pss + max(0, _largest(process.pid) - now.rss))
        except (psutil.Error, OSError):  # it ended meanwhile
            continue
    if not found:
        raise ValueError("no process to measure the memory of")
    return sum(found) / MIB


def _largest(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
