"""`furrow bench compare`: Furrow beside its peers, on the same weights, in one run."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from control.errors import SettingsError
from ops.bench.peers.engine import Engine, Row, Setup, Unavailable
from ops.bench.peers.goals import GOALS, judged
from ops.bench.peers.limits import Cost, Machine
from ops.bench.peers.report import Comparison, chart, table
from ops.bench.peers.results import Results
from ops.bench.peers.runner import DEFAULT_ROWS, ENGINES, NEEDS_GGUF, Peers, Plan, Runner
from ops.bench.peers.weights import BYTES
from ops.harness.farm import say
from ops.harness.figures import Figure
from ops.harness.figures import table as figures_table
from ops.harness.gguf import MIXTURES, TYPES
from ops.harness.models import SHAPES, Models
from ops.harness.program import FILE, describe, models_option, option, several, shape_option


@dataclass(frozen=True)
class Options:
    """Of the command, beside the plan."""

    shape: str
    device: str
    threads: int
    tp: int
    peers: Peers
    json_file: Path | None
    plot: Path | None
    with_goals: bool


@click.command(epilog=f"Engines: {', '.join(ENGINES)}. Weights: {', '.join(BYTES)}.")
@click.option(
    "--engine",
    "names",
    multiple=True,
    metavar="ENGINE[:WEIGHTS]",
    help="Engine and weights to run; repeatable [default: all].",
)
@shape_option("tiny")
@several("--streams", "streams", (1, 8, 64))
@option("--prompt", 512, "Prompt tokens.")
@option("--tokens", 256, "New tokens of each stream.", type=click.IntRange(2))
@several("--ttft", "ttft", (512, 4096))
@option("--rounds", 5, "Rounds; each runs every engine once.")
@option("--device", "cpu", "Device of each engine: cpu or cuda:0.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of each engine [default: all cores].")
@option("--tp", 1, "Ranks of Furrow's farm.")
@click.option("--peer-python", default=sys.executable, help="Python of the other engines [default: this one].")
@click.option("--llama-server", help="Path of llama.cpp's server program.")
@click.option(
    "--peer-env", multiple=True, metavar="NAME=VALUE", help="Variable for the other engines alone; repeatable."
)
@models_option
@click.option("--json", "json_file", type=FILE, help="File for all figures, written after each turn.")
@click.option("--plot", type=FILE, help="File for a chart of the rates, as SVG.")
@click.option("--goals", "with_goals", is_flag=True, help="Compare the figures with Furrow's goals.")
def compare(
    names: tuple[str, ...],
    shape: str,
    streams: tuple[int, ...],
    prompt: int,
    tokens: int,
    ttft: tuple[int, ...],
    rounds: int,
    device: str,
    threads: int | None,
    tp: int,
    peer_python: str,
    llama_server: str | None,
    peer_env: tuple[str, ...],
    folder: Path | None,
    json_file: Path | None,
    plot: Path | None,
    with_goals: bool,
) -> None:
    """Run Furrow and its peers in turns and print their rates, the machine's limits and the ratios.

    A row whose engine is not installed, or refuses its weights, is skipped with the reason. Exit status 1 where a row
    broke, a stream gave fewer tokens than asked, or nothing was measured; with --goals also where one is missed.
    """
    rows = tuple(dict.fromkeys(map(row_of, names or DEFAULT_ROWS)))
    plan = Plan(rows, streams, prompt, tokens, ttft, rounds, SHAPES[shape]["vocab_size"])
    peers = Peers(peer_python, llama_server, dict(map(setting, peer_env)))
    cores = len(os.sched_getaffinity(0))
    options = Options(shape, device, threads or cores, tp, peers, json_file, plot, with_goals)
    with ExitStack() as stack:
        scratch = folder or Path(stack.enter_context(TemporaryDirectory(prefix="furrow-bench-")))
        comparison = run(plan, options, Models(shape, scratch, "float32" if device == "cpu" else "bfloat16"))
    raise SystemExit(conclude(comparison, options))


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


def run(plan: Plan, options: Options, models: Models) -> Comparison:
    """All rounds, the machine's limits measured anew before each."""
    say(f"the model: {options.shape}")
    folder = models.checkpoint()
    machine = Machine()
    described = f"{describe()}; {options.threads} threads, {options.device}"

    def make(row: Row, sizes: dict[str, int]) -> Engine:
        file = None
        if row.engine in NEEDS_GGUF or row.weights in MIXTURES:
            if row.weights not in TYPES | MIXTURES:
                known = ", ".join(TYPES | MIXTURES)
                raise Unavailable(f"no {row.weights} weights are written for llama.cpp; use {known}")
            file = models.gguf(row.weights)
        fields: dict[str, Any] = {"device": options.device, "threads": options.threads, "tp": options.tp, **sizes}
        if not row.engine.startswith("furrow"):
            fields["tp"] = 1
        return ENGINES[row.engine](Setup(folder, row.weights, file, **fields), options.peers)

    def compared(results: Results) -> Comparison:
        return Comparison(described, options.shape, options.device, plan, Cost.of(folder), machine, results)

    def keep(results: Results) -> None:
        if options.json_file is not None:
            options.json_file.write_text(json.dumps(compared(results).as_json(), indent=1))

    results = Runner(plan, make, say, lambda: machine.measure(options.device, options.threads), keep).run()
    comparison = compared(results)
    comparison.raise_limits()
    keep(results)
    return comparison


def conclude(comparison: Comparison, options: Options) -> int:
    """Print and draw what was found; the exit status."""
    click.echo(f"{comparison.machine}\n{table(comparison)}")
    if options.plot is not None:
        options.plot.write_text(chart(comparison), encoding="utf-8")
    faults = comparison.results.faults
    for fault in faults:
        click.echo(f"furrow bench: {fault}", err=True)
    missed: list[Figure] = []
    if options.with_goals:
        goals = GOALS.get((options.shape, options.device.partition(":")[0]), [])
        found, lacking = judged(goals, comparison.results, comparison.share)
        click.echo(figures_table(found))
        for what in sorted(set(lacking)):
            click.echo(f"not measured: {what}")
        missed = [figure for figure in found if not figure.holds]
    return 1 if faults or missed else 0
