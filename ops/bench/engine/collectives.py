"""The time of a collective operation between ranks on this host's CPUs, by implementation and size."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Annotated

import click
import torch
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ops.harness.program import Figure, Outcome, Summary, benchmark, run, summarise
from worker.collective import Collective, rendezvous
from worker.collective.base import Abort

SIZES = (1024, 65_536, 1_048_576)
GLOO = "gloo"
SHARED = "shared"
WARM_UP = 20
BYTES = 2**30
"""No more than so much is exchanged for one figure, so that large ones need not be repeated as often."""
LIMIT_US = 20.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Microseconds of one kind of exchange of `floats` float32 per rank, as rank 0 saw them."""

    way: str
    what: str
    floats: int
    microseconds: Summary


@benchmark
def collectives(
    ranks: Annotated[int, click.IntRange(2, 8)] = 2,
    repeat: Annotated[int, click.IntRange(20), "Exchanges for each figure."] = 3000,
    pin: Annotated[bool, "Bind each rank to a processor of its own."] = False,
) -> Outcome:
    """Time all-reduce and all-gather between processes: over gloo, and through shared memory."""
    click.echo(f"{ranks} ranks of one thread{', bound' if pin else ''}")
    exchanges: list[Measured] = []
    for way in (GLOO, SHARED):
        for one in measure(way, ranks, repeat, pin):
            exchanges.append(one)
            took = one.microseconds
            click.echo(
                f"{way:<12} {one.what:<11} {one.floats:>9,} floats: "
                f"median {took.p50:8.1f} µs, p99 {took.p99:8.1f} µs, worst {took.max:9.1f} µs"
            )
    best = min(one.microseconds.p50 for one in exchanges if (one.what, one.floats) == ("all-reduce", SIZES[0]))
    return Outcome(
        [Figure(f"all-reduce of {SIZES[0]:,} floats, median", best, LIMIT_US, "µs")], {"exchanges": exchanges}
    )


def measure(way: str, ranks: int, repeat: int, pin: bool = False) -> list[Measured]:
    """Every exchange between fresh processes, all in one group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once for all ranks
    with tempfile.TemporaryDirectory(prefix="furrow-bench-") as scratch:
        ours, theirs = context.Pipe()
        place = f"{scratch}/rendezvous"
        processes = [
            context.Process(target=_rank, args=(way, rank, ranks, repeat, pin, place, theirs), daemon=True)
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            exchanges: list[Measured] = ours.recv()
        except EOFError:
            raise click.ClickException(f"the ranks could not measure {way}; what they said is above") from None
        finally:
            for process in processes:
                process.join()
        return exchanges


def _rank(way: str, rank: int, ranks: int, repeat: int, pin: bool, place: str, answer: Connection) -> None:
    """One process of the group; rank 0 has the clock."""
    torch.set_num_threads(1)
    if pin:
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {allowed[rank % len(allowed)]})
    store = PrefixStore("bench", FileStore(place, ranks))
    collective = rendezvous.join(store, rank, ranks, "cpu", Abort(), shared=way != GLOO)
    if way != GLOO and type(collective).__name__ != "SharedMemoryCollective":
        raise click.ClickException("shared memory is not possible here")
    exchanges = []
    for floats in SIZES:
        count = min(repeat, max(WARM_UP, BYTES // (4 * floats)))
        for what in ("all-reduce", "all-gather"):
            exchanges.append(Measured(way, what, floats, summarise(timed(collective, what, floats, count))))
    if rank == 0:
        answer.send(exchanges)
    collective.all_reduce(torch.ones(1))
    collective.close()


def timed(collective: Collective, what: str, floats: int, count: int) -> list[float]:
    """Microseconds of each of `count` exchanges, after some that warm up."""
    tensor = torch.ones(floats)
    microseconds = []
    run = collective.all_reduce if what == "all-reduce" else collective.all_gather
    for turn in range(WARM_UP + count):
        tensor.fill_(turn % 7)
        begun = time.perf_counter_ns()
        run(tensor)
        if turn >= WARM_UP:
            microseconds.append((time.perf_counter_ns() - begun) / 1000)
    return microseconds


if __name__ == "__main__":
    run(collectives)
