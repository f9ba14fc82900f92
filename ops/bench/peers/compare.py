"""`furrow bench compare`: Furrow beside its peers, on the same weights, in one run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import click

from control.errors import SettingsError
from ops.bench.peers.engine import Engine, Row, Setup, Unavailable
from ops.bench.peers.limits import Cost, Machine
from ops.bench.peers.report import Comparison, table
from ops.bench.peers.results import GOALS, EngineResults, judged
from ops.bench.peers.runner import DEFAULT_ROWS, ENGINES, NEEDS_GGUF, Peers, Plan, Runner
from ops.bench.peers.weights import BYTES
from ops.harness.farm import say
from ops.harness.gguf import MIXTURES, TYPES
from ops.harness.models import SHAPES
from ops.harness.program import FILE, ModelsFolder, Shape, describe, figures_table, models_of, with_options


@with_options
def compare(
    names: Annotated[
        tuple[str, ...],
        "--engine",
        {"metavar": "ENGINE[:WEIGHTS]"},
        "Engine and weights to run; repeatable [default: all].",
    ] = (),
    shape: Shape = "tiny",
    streams: tuple[int, ...] = (1, 8, 64),
    prompt: Annotated[int, "Prompt tokens."] = 512,
    tokens: Annotated[int, click.IntRange(2), "New tokens of each stream."] = 256,
    ttft: tuple[int, ...] = (512, 4096),
    rounds: Annotated[int, "Rounds; each runs every engine once."] = 5,
    device: Annotated[str, "Device of each engine: cpu or cuda:0."] = "cpu",
    threads: Annotated[int | None, "CPU threads of each engine [default: all cores]."] = None,
    tp: Annotated[int, "Ranks of Furrow's farm."] = 1,
    peer_python: Annotated[
        str, {"show_default": False}, "Python of the other engines [default: this one]."
    ] = sys.executable,
    llama_server: Annotated[str | None, "Path of llama.cpp's server program."] = None,
    peer_env: Annotated[
        tuple[str, ...], {"metavar": "NAME=VALUE"}, "Variable for the other engines alone; repeatable."
    ] = (),
    folder: ModelsFolder = None,
    json_file: Annotated[Path | None, "--json", FILE, "File for all figures, written after each turn."] = None,
    with_goals: Annotated[bool, "--goals", "Compare the figures with Furrow's goals."] = False,
) -> None:
    """Run Furrow and its peers in turns and print their rates, the machine's limits and the ratios.

    A row whose engine is not installed, or refuses its weights, is skipped with the reason. Exit status 1 where a row
    broke, a stream gave fewer tokens than asked, or nothing was measured; with --goals also where one is missed.
    """
    rows = tuple(dict.fromkeys(map(row_of, names or DEFAULT_ROWS)))
    plan = Plan(rows, streams, prompt, tokens, ttft, rounds, SHAPES[shape]["vocab_size"])
    peers = Peers(peer_python, llama_server, dict(map(setting, peer_env)))
    threads = threads or len(os.sched_getaffinity(0))
    machine = Machine()
    with models_of(shape, folder, "float32" if device == "cpu" else "bfloat16") as models:
        say(f"the model: {shape}")
        checkpoint = models.checkpoint()
        described = f"{describe()}; {threads} threads, {device}"

        def make(row: Row, sizes: dict[str, int]) -> Engine:
            file = None
            if row.engine in NEEDS_GGUF or row.weights in MIXTURES:
                if row.weights not in TYPES | MIXTURES:
                    kinds = ", ".join(TYPES | MIXTURES)
                    raise Unavailable(f"no {row.weights} weights are written for llama.cpp; use {kinds}")
                file = models.gguf(row.weights)
            ranks = tp if row.engine.startswith("furrow") else 1
            setup = Setup(checkpoint, row.weights, file, device=device, threads=threads, tp=ranks, **sizes)
            return ENGINES[row.engine](setup, peers)

        def compared(results: EngineResults) -> Comparison:
            return Comparison(described, shape, device, plan, Cost.of(checkpoint), machine, results)

        def keep(results: EngineResults) -> None:
            if json_file is not None:
                json_file.write_text(json.dumps(compared(results).as_json(), indent=1))

        results = Runner(plan, make, say, lambda: machine.measure(device, threads), keep).run()
        comparison = compared(results)
        comparison.raise_limits()
        keep(results)
    click.echo(f"{comparison.machine}\n{table(comparison)}")
    for fault in results.faults:
        click.echo(f"furrow bench: {fault}", err=True)
    missed = with_goals and not _conclude(comparison)
    raise SystemExit(1 if results.faults or missed else 0)


compare.epilog = f"Engines: {', '.join(ENGINES)}. Weights: {', '.join(BYTES)}."


def _conclude(comparison: Comparison) -> bool:
    """Print the goals of the shape; True if none was missed."""
    goals = GOALS.get((comparison.model, comparison.device.partition(":")[0]), [])
    figures, lacking = judged(goals, comparison.results, comparison.share)
    click.echo(figures_table(figures))
    for subject in sorted(set(lacking)):
        click.echo(f"not measured: {subject}")
    return all(figure.holds for figure in figures)


def row_of(name: str) -> Row:
    """The row that ENGINE[:WEIGHTS] names; float32 where no weights are named. Raises SettingsError."""
    engine, _, weights = name.partition(":")
    weights = weights or "f32"
    if engine not in ENGINES:
        raise SettingsError(f"--engine {name}: no engine {engine!r}; use one of {', '.join(ENGINES)}")
    if weights not in BYTES:
        raise SettingsError(f"--engine {name}: no weights {weights!r}; use one of {', '.join(BYTES)}")
    return Row(engine, weights)


def setting(words: str) -> tuple[str, str]:
    """Raises SettingsError for anything but NAME=VALUE."""
    name, equals, value = words.partition("=")
    if not (name and equals):
        raise SettingsError(f"--peer-env {words}: say NAME=VALUE")
    return name, value
