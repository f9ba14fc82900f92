"""The time of a collective operation between ranks on this host's CPUs, by implementation and size."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import click
import torch
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]

from ops.bench import program
from ops.bench.common.figures import Figure, conclude
from ops.bench.common.machine import describe
from ops.bench.common.summary import Summary, summarise
from worker.collective import Collective, rendezvous
from worker.collective.abort import Abort

SIZES = (1024, 65_536, 1_048_576)
GLOO, SHARED = "gloo", "shared"
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


@click.command()
@click.option("--ranks", type=click.IntRange(2, 8), default=2, show_default=True)
@click.option("--repeat", type=click.IntRange(20), default=3000, show_default=True, help="Exchanges for each figure.")
@click.option("--pin/--no-pin", default=False, show_default=True, help="Bind each rank to a processor of its own.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write all figures here."
)
def collectives(ranks: int, repeat: int, pin: bool, json_file: Path | None) -> None:
    """Time all-reduce and all-gather between processes: over gloo, and through shared memory."""
    machine = f"{describe()}; {ranks} ranks of one thread{', bound' if pin else ''}"
    click.echo(machine)
    found: list[Measured] = []
    for way in (GLOO, SHARED):
        for one in measure(way, ranks, repeat, pin):
            found.append(one)
            took = one.microseconds
            click.echo(
                f"{way:<12} {one.what:<11} {one.floats:>9,} floats: "
                f"median {took.p50:8.1f} µs, p99 {took.p99:8.1f} µs, worst {took.max:9.1f} µs"
            )
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "figures": [asdict(one) for one in found]}, indent=1))
    best = min(one.microseconds.p50 for one in found if (one.what, one.floats) == ("all-reduce", SIZES[0]))
    conclude([Figure(f"all-reduce of {SIZES[0]:,} floats, median", best, LIMIT_US, "µs")])


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
            found: list[Measured] = ours.recv()
        except EOFError:
            raise click.ClickException(f"the ranks could not measure {way}; what they said is above") from None
        finally:
            for process in processes:
                process.join()
        return found


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
    found = []
    for floats in SIZES:
        count = min(repeat, max(WARM_UP, BYTES // (4 * floats)))
        for what in ("all-reduce", "all-gather"):
            found.append(Measured(way, what, floats, summarise(timed(collective, what, floats, count))))
    if rank == 0:
        answer.send(found)
    collective.all_reduce(torch.ones(1))
    collective.close()


def timed(collective: Collective, what: str, floats: int, count: int) -> list[float]:
    """Microseconds of each of `count` exchanges, after some that warm up."""
    tensor, microseconds = torch.ones(floats), []
    run = collective.all_reduce if what == "all-reduce" else collective.all_gather
    for turn in range(WARM_UP + count):
        tensor.fill_(turn % 7)
        begun = time.perf_counter_ns()
        run(tensor)
        if turn >= WARM_UP:
            microseconds.append((time.perf_counter_ns() - begun) / 1000)
    return microseconds


if __name__ == "__main__":
    program.run(collectives)
