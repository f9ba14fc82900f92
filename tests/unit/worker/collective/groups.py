"""A group whose ranks are threads of one process: the same memory and the same exchanges as between processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from worker.collective import shared_memory
from worker.collective.base import Abort
from worker.collective.shared_memory import NativeExchange, Peers, Segment, SharedMemoryCollective, library


@dataclass
class Threads:
    """The ranks of one group."""

    ranks: list[SharedMemoryCollective]
    exchanges: list[NativeExchange]
    aborts: list[Abort]
    pool: ThreadPoolExecutor

    def each(self, job: Callable[[SharedMemoryCollective], Any]) -> list[Any]:
        """`job` on every rank at once; the results in rank order. Raises the first rank's error."""
        return [future.result() for future in [self.pool.submit(job, rank) for rank in self.ranks]]


@contextmanager
def group(world_size: int, pids: list[int] | None = None, deadline_s: float = 20.0) -> Iterator[Threads]:
    """`pids` are the processes that the ranks watch; by default this one, which lives."""
    if library() is None:
        pytest.skip("no C++ compiler here")
    descriptor = shared_memory.create(world_size)
    try:
        aborts = [Abort() for _ in range(world_size)]
        exchanges = [
            NativeExchange(
                Segment(descriptor, rank, world_size),
                Peers(pids or [os.getpid()] * world_size, rank),
                aborts[rank],
                deadline_s,
            )
            for rank in range(world_size)
        ]
    finally:
        os.close(descriptor)
    ranks = [SharedMemoryCollective(exchange, rank, world_size) for rank, exchange in enumerate(exchanges)]
    with ThreadPoolExecutor(world_size) as pool:
        yield Threads(ranks, exchanges, aborts, pool)
    for rank in ranks:
        rank.close()
