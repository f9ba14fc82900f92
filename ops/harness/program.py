"""A benchmark as a program: options, a line about the machine, figures as a table and as JSON, the exit status."""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import psutil

from control import logs
from control.errors import FurrowError
from control.quantization import QUANTS
from ops.harness.figures import Figure, table
from ops.harness.models import SHAPES

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
PATH = click.Path(exists=True, path_type=Path)


@dataclass(frozen=True)
class Outcome:
    """What a benchmark returns where it has more than figures with limits."""

    figures: Sequence[Figure] | None = None
    """None: it has no limits."""
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    """More for the JSON file; dataclasses are written as objects."""


def benchmark(function: Callable[..., Sequence[Figure] | Outcome]) -> click.Command:
    """A command that prints the machine, runs `function`, prints its figures beside their limits and, with --json FILE,
    writes all of that. Its exit status is 1 where a figure is missed, or where there is none."""

    @click.command(name=function.__name__.replace("_", "-"))
    @click.option("--json", "json_file", type=FILE, help="Write all figures into this file.")
    @functools.wraps(function)
    def command(json_file: Path | None, **options: Any) -> None:
        machine = describe()
        click.echo(machine)
        returned = function(**options)
        outcome = returned if isinstance(returned, Outcome) else Outcome(returned)
        figures = [asdict(one) | {"holds": one.holds} for one in outcome.figures or ()]
        if json_file is not None:
            everything = {"machine": machine, "figures": figures, **outcome.details}
            json_file.write_text(json.dumps(everything, indent=1, default=asdict))
        if outcome.figures is not None:
            conclude(outcome.figures)

    return command


def conclude(figures: Sequence[Figure]) -> None:
    """Print the table. Raises SystemExit with status 1 where a figure is missed, or where there is none."""
    click.echo(table(figures))
    if not figures or not all(figure.holds for figure in figures):
        raise SystemExit(1)


def run(command: click.Command, name: str | None = None) -> None:
    """Run a command with this process's arguments; a FurrowError becomes one line and exit status 1."""
    logs.configure("auto", "warning")
    try:
        command.main(prog_name=name)
    except FurrowError as error:
        click.echo(f"{name or command.name}: {error}", err=True)
        sys.exit(1)


# --- options ----------------------------------------------------------------------------------------------------------

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def option(name: str, default: Any, text: str = "", **more: Any) -> Decorator:
    """An option whose type is that of its default, which --help shows; counts are at least 1 unless `type` is given."""
    if isinstance(default, int) and not isinstance(default, bool):
        more.setdefault("type", click.IntRange(1))
    return click.option(name, default=default, show_default=True, help=text, **more)


def several(name: str, parameter: str, default: Sequence[int], text: str = "") -> Decorator:
    """A repeatable option of counts."""
    return click.option(
        name, parameter, type=click.IntRange(1), multiple=True, default=default, show_default=True, help=text
    )


def shape_option(default: str | None) -> Decorator:
    """--shape: a random model; None: another model is the default."""
    text = "A random model." if default else "A random model [default: the demonstration model]."
    return click.option("--shape", type=click.Choice(list(SHAPES)), default=default, show_default=True, help=text)


models_option = click.option("--models", "folder", type=FOLDER, help="Keep the random models here, or take them.")
quant_option = click.option("--quant", type=click.Choice(QUANTS), help="Pack the weights.")
threads_option = click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's choice].")


# --- the machine ------------------------------------------------------------------------------------------------------


def describe() -> str:
    """Processor, cores, memory, what else keeps it busy, and the versions that matter, in one line."""
    memory = psutil.virtual_memory().total / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return (
        f"machine: {_processor()}, {psutil.cpu_count()} cores, {memory:.0f} GiB, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, {versions}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
