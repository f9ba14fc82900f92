"""The kernel's count of processes that it killed for lack of memory, in this process's control group."""

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

_GROUPS, _OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_COUNT = re.compile(rb"^oom_kill (\d{1,18})$", re.MULTILINE)


class MemoryKills:
    """Kills since its start. A child's end by SIGKILL claims one; where there is no count, there is none to claim."""

    def __init__(
        self, groups: Path = _GROUPS, own_group: Path = _OWN_GROUP, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._files, self._clock = list(_files(groups, own_group)), clock
        self._seen = 0
        self._seen = self._count()
        self._kills: list[float] = []
        """The times at which kills were seen that nothing claimed."""

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
        for file in self._files:
            with suppress(OSError):
                if found := _COUNT.search(file.read_bytes()):
                    return int(found[1])
        return self._seen


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
