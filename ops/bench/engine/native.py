"""The engine with the forward in C++ beside the engine with torch's on the same weights."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import click
import torch

from control.quantization import QUANTS
from ops.bench import program
from ops.bench.common.machine import describe
from ops.bench.common.shapes import SHAPES
from ops.bench.common.summary import median
from ops.bench.engine.engines import Furrow
from ops.bench.peers.models import Models
from worker.kv.base import STORED_TYPES
from worker.native.host import SWITCH


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of a prefill of all prompts, and of decode steps."""

    first: list[float]
    decode: list[float]


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="tiny", show_default=True, help="A random model.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Keep the random model here.")
@click.option("--dtype", type=click.Choice(("float32", "bfloat16")), default="float32", help="The checkpoint's.")
@click.option("--quant", type=click.Choice(QUANTS), help="Pack the weights.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 2, 4, 8, 16, 64))
@click.option("--prompt", "length", type=click.IntRange(1), default=64, show_default=True, help="Prompt tokens.")
@click.option("--tokens", type=click.IntRange(2), default=16, show_default=True, help="Tokens to generate.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Taken in turns.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of both [default: torch's choice].")
@click.option("--alone", is_flag=True, help="Only C++, for memory or time that doesn't do for both.")
@click.option(
    "--kv-type", "types", type=click.Choice(list(STORED_TYPES)), multiple=True, help="Only C++, with each type."
)
def native(
    shape: str,
    folder: Path | None,
    dtype: str,
    quant: str | None,
    batches: tuple[int, ...],
    length: int,
    tokens: int,
    rounds: int,
    threads: int | None,
    alone: bool,
    types: tuple[str, ...],
) -> None:
    """Decode with both in turns: medians and fastest steps, which other work on the machine disturbs least."""
    if threads is not None:
        torch.set_num_threads(threads)
    click.echo(f"{describe()}; {torch.get_num_threads()} threads\n{shape} {quant or dtype}, {length} prompt tokens")
    with tempfile.TemporaryDirectory(prefix="furrow-bench-") as scratch:
        checkpoint = Models(shape, folder or Path(scratch), dtype).checkpoint()
        room = max(batches) * (length + tokens)
        engines = {f"C++ {one}": _engine(checkpoint, quant, room, "1", one) for one in types or ("f32",)}
        click.echo(_memory(checkpoint, next(iter(engines.values()))))
        if not (alone or types):
            engines["torch"] = _engine(checkpoint, quant, room, "0")
        for batch in batches:
            generator = torch.Generator().manual_seed(batch)
            prompts = torch.randint(SHAPES[shape]["vocab_size"], (batch, length), generator=generator).tolist()
            found = {name: Steps([], []) for name in engines}
            for _ in range(rounds):
                for name, engine in engines.items():
                    seconds = engine.decode(prompts, tokens).seconds
                    found[name].first.append(seconds[0])
                    found[name].decode.extend(seconds[1:])
            click.echo(f"batch {batch}: " + "; ".join(line(name, batch, steps) for name, steps in found.items()))


def _engine(checkpoint: Path, quant: str | None, room: int, switch: str, kv_type: str | None = None) -> Furrow:
    os.environ[SWITCH] = switch
    return Furrow(checkpoint, "float32", "cpu", kv_tokens=room, quant=quant, kv_type=kv_type)


def _memory(checkpoint: Path, engine: Furrow) -> str:
    """The size of the weights beside that of their files, as text."""
    files = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    return f"weights {engine.weight_bytes / 1e6:.0f} MB, files {files / 1e6:.0f} MB"


def line(name: str, batch: int, steps: Steps) -> str:
    """Speeds in words."""
    fastest, middle = min(steps.decode), median(steps.decode)
    return (
        f"{name} {batch / middle:.1f} tok/s ({middle * 1e3:.2f} ms a step, at best {batch / fastest:.1f} tok/s), "
        f"prompts {min(steps.first) * 1e3:.0f} ms"
    )


if __name__ == "__main__":
    program.run(native)
