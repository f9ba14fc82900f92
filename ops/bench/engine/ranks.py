"""A model on several CPU ranks beside the same model on one rank with the same processors."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import click
import torch
from torch.distributed import FileStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from transformers.utils import logging

from ops.bench import program
from ops.bench.common.figures import Figure, conclude
from ops.bench.common.machine import describe
from ops.bench.common.random_model import build
from ops.bench.common.shapes import SHAPES
from ops.bench.common.summary import median
from ops.bench.engine.engines import Decoded, Furrow
from worker.collective import Solo, rendezvous
from worker.collective.abort import Abort

LIMIT = 0.90


@dataclass(frozen=True, slots=True)
class Compared:
    """Medians over all decode steps of all rounds, ms. `equal` counts the sequences with the same tokens from all."""

    batch: int
    one_ms: float
    shared_ms: float
    sockets_ms: float
    equal: int

    @property
    def ratio(self) -> float:
        """The decode speed of the ranks that share memory over that of one rank."""
        return self.one_ms / self.shared_ms


class Ranks:
    """The processes of one group, each with so many threads; `decode` is timed by rank 0."""

    def __init__(self, folder: Path, dtype: str, tp: int, threads: int, kv_tokens: int, shared: bool = True) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])  # imported once for all ranks
        self._scratch = tempfile.TemporaryDirectory(prefix="furrow-bench-")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(tp):
            ours, theirs = context.Pipe()
            about = (folder, dtype, rank, tp, threads, kv_tokens, shared, f"{self._scratch.name}/rendezvous", theirs)
            self._processes.append(context.Process(target=_serve, args=about, daemon=True))
            self._processes[-1].start()
            theirs.close()
            self._pipes.append(ours)
        for pipe in self._pipes:
            self._heard(pipe)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
        self._scratch.cleanup()

    def decode(self, prompts: list[list[int]], count: int) -> Decoded:
        """`count` tokens for each prompt, all in one batch."""
        for pipe in self._pipes:
            pipe.send((prompts, count))
        first, *_others = [self._heard(pipe) for pipe in self._pipes]
        return first

    def _heard(self, pipe: Connection) -> Decoded:
        try:
            return pipe.recv()
        except EOFError:
            raise click.ClickException("a rank has ended; what it said is above") from None


def _serve(
    folder: Path,
    dtype: str,
    rank: int,
    tp: int,
    threads: int,
    kv_tokens: int,
    shared: bool,
    place: str,
    pipe: Connection,
) -> None:
    """One rank, until its pipe is closed."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    store = PrefixStore("bench", FileStore(place, tp))
    collective = Solo() if tp == 1 else rendezvous.join(store, rank, tp, "cpu", Abort(), shared)
    furrow = Furrow(folder, dtype, "cpu", kv_tokens, collective=collective)
    pipe.send(None)
    try:
        while True:
            pipe.send(furrow.decode(*pipe.recv()))
    except EOFError:
        collective.close()


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="tiny", show_default=True, help="A random model.")
@click.option("--tp", type=click.IntRange(2, 8), default=2, show_default=True)
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 8), show_default=True)
@click.option("--prompt", "length", type=click.IntRange(1), default=64, show_default=True, help="Prompt tokens.")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens to generate.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Measured rounds, taken in turns.")
@click.option("--dtype", type=click.Choice(("float32", "float64")), default="float32")
@click.option("--threads", type=click.IntRange(1), help="Of each rank [default: its share of the processors].")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write all figures here."
)
def ranks(
    shape: str,
    tp: int,
    batches: tuple[int, ...],
    length: int,
    tokens: int,
    rounds: int,
    dtype: str,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Decode greedily on one rank with all threads, and on several through shared memory and over gloo, in turns."""
    each = threads or max(1, len(os.sched_getaffinity(0)) // tp)
    machine = f"{describe()}; {shape}, {dtype}, one rank of {tp * each} threads beside {tp} of {each}"
    click.echo(f"{machine}\n{length} prompt tokens, {tokens} generated, {rounds} rounds")
    room = max(batches) * (length + tokens)
    found: list[Compared] = []
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="furrow-bench-")))
        folder = build(shape, scratch, dtype)
        groups = [
            stack.enter_context(Ranks(folder, dtype, ranks, threads, room, shared))
            for ranks, threads, shared in ((1, tp * each, True), (tp, each, True), (tp, each, False))
        ]
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        for batch in batches:
            generator = torch.Generator().manual_seed(batch)
            prompts = torch.randint(vocabulary, (batch, length), generator=generator).tolist()
            found.append(compare(groups, prompts, tokens, rounds))
            click.echo(line(found[-1], tp))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "batches": [asdict(one) for one in found]}, indent=1))
    conclude([Figure(f"tp {tp} over tp 1, batch {one.batch}", one.ratio, LIMIT, at_least=True) for one in found])


def compare(groups: list[Ranks], prompts: list[list[int]], tokens: int, rounds: int) -> Compared:
    """All groups in turns; a first round is not counted."""
    runs = [[group.decode(prompts, tokens) for group in groups] for _ in range(rounds + 1)]
    one, shared, sockets = (
        1000 * median([second for run in runs[1:] for second in run[place].seconds[1:]]) for place in range(3)
    )
    equal = sum(len(set(map(tuple, rows))) == 1 for rows in zip(*(run.tokens for run in runs[-1]), strict=True))
    return Compared(len(prompts), one, shared, sockets, equal)


def line(found: Compared, tp: int) -> str:
    """The comparison in words."""
    return (
        f"batch {found.batch}: one rank {found.one_ms:.2f} ms a step ({1000 * found.batch / found.one_ms:.1f} tok/s), "
        f"{tp} sharing memory {found.shared_ms:.2f} ms ({found.ratio:.2f} times as fast), over gloo "
        f"{found.sockets_ms:.2f} ms ({found.one_ms / found.sockets_ms:.2f}); "
        f"equal tokens in {found.equal} of {found.batch} sequences"
    )


if __name__ == "__main__":
    program.run(ranks)
