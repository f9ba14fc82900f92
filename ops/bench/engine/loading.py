"""The memory of a load: what a rank keeps, and its peak, beside the size of the tensors in the model's files."""

from __future__ import annotations

import gc
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Annotated

import click
import psutil

from ops.harness.program import Figure, Outcome, Quant, benchmark, run
from worker.repository.files import inspect, is_gguf
from worker.weights.gguf import read_model

MIB = 2**20
EVERY_S = 0.005
# Times the tensors' size.
KEPT = 1.1
PEAK = 1.2


@benchmark
def loading(
    model: Annotated[Path, click.Path(path_type=Path), "A folder or a GGUF file."],
    quant: Quant = None,
    rounds: int = 3,
) -> Outcome:
    """Load a folder or GGUF file in a process of its own. Pages of files, which the kernel can drop, count nowhere."""
    size = tensor_bytes(model)
    click.echo(f"{model.name}: {size / MIB:.0f} MiB of tensors in the files")
    context = multiprocessing.get_context("spawn")
    sizes: list[float] = []
    peaks: list[float] = []
    for _ in range(rounds):
        ours, theirs = context.Pipe()
        child = context.Process(target=_load, args=(theirs, model, quant), daemon=True)
        child.start()
        bare, after, peak = _watched(child.pid or 0, ours)
        child.join()
        sizes.append((after - bare) / size)
        peaks.append((peak - bare) / size)
        click.echo(f"bare {bare / MIB:.0f} MiB, kept {(after - bare) / MIB:.0f}, peak {(peak - bare) / MIB:.0f}")
    figures = [
        Figure("weights kept, times the files' tensors", median(sizes), KEPT),
        Figure("peak of a load, times the files' tensors", median(peaks), PEAK),
    ]
    return Outcome(figures if quant is None else None, {"kept": sizes, "peaks": peaks})


def tensor_bytes(model: Path) -> int:
    """Bytes of all tensors in the files of a model, with the headers of safetensors."""
    if is_gguf(model):
        return sum(tensor.bytes for tensor in read_model(model).tensors.values())
    return sum(file.stat().st_size for file in inspect(model).weights)


def _load(parent: Connection, model: Path, quant: str | None) -> None:
    """Import what a rank imports, load, and wait to be measured in between."""
    import torch

    from worker.collective.base import Solo
    from worker.models.loading import load
    from worker.native.library import load_library

    torch.mm(torch.zeros(8, 8), torch.zeros(8, 8))  # the memory of its threads
    load_library()
    parent.send("bare")
    parent.recv()
    served = load(model, collective=Solo(), quant=quant)
    gc.collect()
    parent.send("loaded")
    parent.recv()
    del served


def _watched(pid: int, child: Connection) -> tuple[int, int, int]:
    """Bytes of the process before and after the load, and the most in between."""
    process = psutil.Process(pid)
    child.recv()
    bare = peak = _bytes(process)
    child.send("go on")
    while not child.poll(EVERY_S):
        peak = max(peak, _bytes(process))
    child.recv()
    after = _bytes(process)
    child.send("go on")
    return bare, after, max(peak, after)


def _bytes(process: psutil.Process) -> int:
    """Memory of the process that is no page of a file."""
    memory = process.memory_info()
    return memory.rss - memory.shared


if __name__ == "__main__":
    run(loading)
