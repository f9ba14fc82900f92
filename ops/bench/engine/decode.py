"""The engine's decode speed beside that of transformers' `generate` on the same weights in the same run."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch
from transformers.utils import logging

from control.quantization import QUANTS
from ops.bench import program
from ops.bench.common.machine import describe
from ops.bench.common.random_model import build
from ops.bench.common.shapes import SHAPES
from ops.bench.common.summary import median
from ops.bench.engine.engines import Decoded, Furrow, Transformers
from worker.kv.torch.pages import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over all steps of all rounds; `equal` counts the sequences with the same tokens from both."""

    batch: int
    furrow_step_ms: float
    transformers_step_ms: float
    furrow_tokens_per_second: float
    transformers_tokens_per_second: float
    furrow_first_ms: float
    transformers_first_ms: float
    ratio: float
    """Furrow's decode speed over transformers'; above 1 Furrow is faster."""
    equal: int


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="tiny", show_default=True, help="A random model.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Or this model folder.")
@click.option("--batch", "batches", type=click.IntRange(1), multiple=True, default=(1, 8), show_default=True)
@click.option("--prompt", "length", type=click.IntRange(1), default=64, show_default=True, help="Prompt tokens.")
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Tokens to generate.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True, help="Measured rounds, taken in turns.")
@click.option("--dtype", type=click.Choice(("float32", "float64", "bfloat16", "float16")), default="float32")
@click.option("--quant", type=click.Choice(QUANTS), help="Pack Furrow's weights; transformers' stay as they are.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda:0.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of both [default: torch's choice].")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write all figures here."
)
def decode(
    shape: str,
    model: Path | None,
    batches: tuple[int, ...],
    length: int,
    tokens: int,
    rounds: int,
    dtype: str,
    quant: str | None,
    device: str,
    threads: int | None,
    json_file: Path | None,
) -> None:
    """Decode greedily with both engines, in turns, and print the medians and their ratio."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise click.UsageError(f"--device {device}: torch sees no GPU here; use cpu")
    logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    machine = f"{describe()}; {torch.get_num_threads()} threads, {quant or dtype}, {device}"
    click.echo(f"{machine}\n{model or shape}: {length} prompt tokens, {tokens} generated, {rounds} rounds")
    with tempfile.TemporaryDirectory(prefix="furrow-bench-") as scratch:
        folder = model or build(shape, Path(scratch), dtype)
        vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
        # A GPU keeps whole blocks of positions, and one more where it runs ahead.
        room = max(batches) * (length + tokens + 2 * BLOCK_TOKENS)
        furrow = Furrow(folder, dtype, device, kv_tokens=room, quant=quant)
        reference = Transformers(folder, dtype, device)
        found = []
        for batch in batches:
            generator = torch.Generator().manual_seed(batch)
            prompts = torch.randint(vocabulary, (batch, length), generator=generator).tolist()
            found.append(compare(furrow, reference, prompts, tokens, rounds))
            click.echo(line(found[-1]))
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": machine, "batches": [asdict(one) for one in found]}, indent=1))


def compare(furrow: Furrow, reference: Transformers, prompts: list[list[int]], tokens: int, rounds: int) -> Comparison:
    """Both engines in turns, so that a change of the machine's mood meets both; a first round is not counted."""
    ours: list[Decoded] = []
    theirs: list[Decoded] = []
    for _ in range(rounds + 1):
        ours.append(furrow.decode(prompts, tokens))
        theirs.append(reference.decode(prompts, tokens))
    step = [median([s for one in runs[1:] for s in one.seconds[1:]]) for runs in (ours, theirs)]
    first = [median([one.seconds[0] for one in runs[1:]]) for runs in (ours, theirs)]
    return Comparison(
        batch=len(prompts),
        furrow_step_ms=step[0] * 1000,
        transformers_step_ms=step[1] * 1000,
        furrow_tokens_per_second=len(prompts) / step[0],
        transformers_tokens_per_second=len(prompts) / step[1],
        furrow_first_ms=first[0] * 1000,
        transformers_first_ms=first[1] * 1000,
        ratio=step[1] / step[0],
        equal=sum(a == b for a, b in zip(ours[-1].tokens, theirs[-1].tokens, strict=True)),
    )


def line(found: Comparison) -> str:
    """The comparison in words."""
    ours = f"{found.furrow_tokens_per_second:.1f} tok/s ({found.furrow_step_ms:.2f} ms a step)"
    theirs = f"{found.transformers_tokens_per_second:.1f} tok/s ({found.transformers_step_ms:.2f} ms)"
    return (
        f"batch {found.batch}: Furrow {ours}, transformers {theirs}: {found.ratio:.2f} times as fast; "
        f"prompt and first token {found.furrow_first_ms:.1f} ms and {found.transformers_first_ms:.1f} ms; "
        f"equal tokens in {found.equal} of {found.batch} sequences"
    )


if __name__ == "__main__":
    program.run(decode)
