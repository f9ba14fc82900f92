"""How much memory the parts of a private farm take, sampled while it works."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

import psutil

EVERY_S = 0.5
MIB = 2**20


def part_of(name: str, command: Sequence[str]) -> str | None:
    """Which part of a farm a process is: api, redis, rank; None for any other."""
    if name.startswith("furrow-rank"):
        return "rank"
    if any(name.startswith(server) for server in ("redis", "valkey")):
        return "redis"
    return "api" if "api" in command[1:4] else None


class MemorySampler:
    """Sums the resident memory of this process's descendants by part, in MiB, until cancelled."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = defaultdict(list)

    async def run(self) -> None:
        while True:
            self._sample()
            await asyncio.sleep(EVERY_S)

    def _sample(self) -> None:
        sums: dict[str, float] = defaultdict(float)
        for process in psutil.Process().children(recursive=True):
            try:
                part = part_of(process.name(), process.cmdline())
                if part is not None:
                    sums[part] += process.memory_info().rss / MIB
            except psutil.Error:  # it ended meanwhile
                continue
        for part, resident in sums.items():
            self.samples[part].append(resident)


def growth(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Part → MiB by which the peak of the second half of the time exceeds that of the first. Raises ValueError for
    less than two samples of a part."""
    grown: dict[str, float] = {}
    for part, values in samples.items():
        if len(values) < 2:
            raise ValueError(f"{len(values)} samples of {part} say nothing about growth")
        middle = len(values) // 2
        grown[part] = max(values[middle:]) - max(values[:middle])
    return grown
