"""The kernel's count of processes that it killed for lack of memory, in this process's control group or else on this
machine."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

RECENT_S = 30.0
"""Between a kill and the end of its process, whose memory is given back meanwhile."""
OUT_OF_MEMORY = (
    "the kernel ended it for lack of memory (oom_kill of its control group rose); give the host or container more "
    "memory, or load the model with --quant or fewer --kv-tokens"
)

_GROUPS, _OWN_GROUP, _MACHINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"), Path("/proc/vmstat")
_COUNT = re.compile(rb"^oom_kill (\d{1,18})$", re.MULTILINE)


class MemoryKills:
    """Kills since its start. A child's end by SIGKILL claims one; where there is no count, there is none to claim. The
    kernel's count has the group's processes that it killed for the group's limit and for want of memory of the machine;
    outside of a group those of the whole machine are counted."""

    def __init__(
        self,
        groups: Path = _GROUPS,
        own_group: Path = _OWN_GROUP,
        clock: Callable[[], float] = time.monotonic,
        *,
        machine: Path = _MACHINE,
        unclaimed_from: int | None = None,
    ) -> None:
        """`unclaimed_from` is that of an earlier process on this host: kills since then can be claimed too."""
        # One file for good: the machine's count is another number, and not to be taken where the group's is away.
        self._file = next((file for file in (*_files(groups, own_group), machine) if _kills(file) is not None), None)
        self._clock = clock
        self._seen = 0
        now = self._count()
        self._seen = now if unclaimed_from is None or unclaimed_from > now else unclaimed_from
        self._kills: list[float] = []
        """The times at which kills were seen that nothing claimed."""

    @property
    def unclaimed_from(self) -> int:
        """The count before the kills that nothing has claimed yet."""
        return self._seen - len(self._kills)

    def look(self) -> None:
        """Read the count. Call now and then: a kill of another process is not claimed long after."""
        now, count = self._clock(), self._count()
        self._kills = [at for at in self._kills if at > now - RECENT_S]
        self._kills += [now] * min(count - self._seen, 100)
        self._seen = count

    def claim(self) -> bool:
        """True if one happened of late that no other end was explained with."""
        self.look()
        if not self._kills:
            return False
        self._kills.pop(0)
        return True

    def _count(self) -> int:
        count = None if self._file is None else _kills(self._file)
        return self._seen if count is None else count


def _kills(file: Path) -> int | None:
    """The count in a file; None where there is none."""
    with suppress(OSError):
        if match := _COUNT.search(file.read_bytes()):
            return int(match[1])
    return None


def _files(groups: Path, own_group: Path) -> Iterator[Path]:
    """The files that may have the count, of version 2 and of version 1 of control groups."""
    with suppress(OSError, ValueError):
        for line in own_group.read_text(errors="replace").splitlines():
            _, controllers, path = line.split(":", 2)
            root, name = groups, "memory.events"
            if controllers:
                root, name = groups / "memory", "memory.oom_control"
            if not controllers or "memory" in controllers.split(","):
                # In a container the path may be the host's, of which only the root is visible.
                yield from (root / path.lstrip("/") / name, root / name)
