"""When each token of each client left its leader: shared memory between the process that emits and the one that reads.

Both take the time from the same monotonic clock of the host, so that a difference needs no synchronising.
"""

from __future__ import annotations

import mmap
from pathlib import Path

TOKENS = 1024
"""Of each client's tokens the last ones are kept; a reader that is further behind is not timed any more."""
_DOUBLE = 8


class Ring:
    """Seconds at which token `seq` of `client` was handed to Redis, for `clients` clients."""

    def __init__(self, path: Path, clients: int) -> None:
        size = clients * TOKENS * _DOUBLE
        with path.open("r+b" if path.exists() else "w+b") as file:
            if path.stat().st_size < size:
                file.truncate(size)
            self._memory = mmap.mmap(file.fileno(), size)
        self.times = memoryview(self._memory).cast("d")
        """By `client * TOKENS + seq % TOKENS`: plain, because both sides use it for every token."""
