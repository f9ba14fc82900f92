"""Trials of the collectives between two ranks, which are threads of the trial's process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from worker.collective import Collective, shared_memory
from worker.collective.base import Abort
from worker.collective.shared_memory import NativeExchange, Peers, Segment, SharedMemoryCollective, library
from worker.collective.torch.process_group import ProcessGroupCollective
from worker.selftest.trial import NotAvailable, TrialCase, TrialRequest

RANKS = 2


def native(request: TrialRequest) -> Iterator[TrialCase]:
    if library() is None:
        raise NotAvailable("it can't be compiled here")
    if request.device.type != "cpu":
        raise NotAvailable("GPUs don't share the host's memory")
    descriptor = shared_memory.create(RANKS)
    try:
        groups = [
            SharedMemoryCollective(
                NativeExchange(Segment(descriptor, rank, RANKS), Peers([os.getpid()] * RANKS, rank), Abort()),
                rank,
                RANKS,
            )
            for rank in range(RANKS)
        ]
    finally:
        os.close(descriptor)
    yield from cases(request, groups)
    for group in groups:
        group.close()


def nccl(request: TrialRequest) -> Iterator[TrialCase]:
    """Between two GPUs of the host; where there is one, a group of one rank, which shows that the library works."""
    if request.device.type != "cuda" or not dist.is_nccl_available():
        raise NotAvailable("there is no NCCL for this device")
    world = min(RANKS, torch.cuda.device_count())
    backend: Any = dist  # HashStore is not in its __all__, and its stubs want options
    store = backend.HashStore()

    def joined(rank: int) -> Collective:
        torch.cuda.set_device(rank)
        return ProcessGroupCollective(backend.ProcessGroupNCCL(store, rank, world))

    with ThreadPoolExecutor(world) as pool:
        groups = list(pool.map(joined, range(world)))
    yield from cases(request, groups)


def cases(request: TrialRequest, groups: Sequence[Collective]) -> Iterator[TrialCase]:
    """Sum, gather and broadcast of as much as a step of the model exchanges; every rank has the same result."""
    rows = [request.random(request.tokens, request.shapes.hidden) * (rank + 1) for rank in range(len(groups))]
    exact = [row.double().cpu() for row in rows]
    jobs: dict[str, tuple[Callable[[Collective, Tensor], Tensor], Tensor]] = {
        "sum": (lambda group, row: group.all_reduce(row), sum(exact[1:], exact[0])),
        "gather": (lambda group, row: group.all_gather(row), torch.cat(exact, -1)),
        "broadcast": (lambda group, row: group.broadcast(row, len(groups) - 1), exact[-1]),
    }
    for name, (job, expected) in jobs.items():

        def compute(job: Callable[[Collective, Tensor], Tensor] = job) -> Tensor:
            rows_by_rank = [
                row.to(f"cuda:{rank}" if row.is_cuda else "cpu", copy=True) for rank, row in enumerate(rows)
            ]
            with ThreadPoolExecutor(len(groups)) as pool:
                return torch.stack([result.cpu() for result in pool.map(job, groups, rows_by_rank)])

        moved = rows[0].nbytes * len(groups)
        shape = f"{name} of {request.tokens} x {request.shapes.hidden}, {len(groups)} ranks"
        yield TrialCase(shape, rows[0].dtype, compute, torch.stack([expected] * len(groups)), bytes=moved)
