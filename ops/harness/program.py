"""A benchmark as a program: its options, a line about the machine, figures as a table and as JSON, the exit status."""

from __future__ import annotations

import functools
import inspect
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, get_args, get_type_hints

import click
import psutil

from control import logs
from control.errors import FurrowError
from control.quantization import QUANTS
from ops.harness.models import SHAPES, Models

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
PATH = click.Path(exists=True, path_type=Path)


@dataclass(frozen=True)
class Outcome:
    """The result of a benchmark that has more than figures with limits."""

    figures: Sequence[Figure] | None = None
    """None: it has no limits."""
    details: dict[str, Any] = field(default_factory=dict[str, Any])
    """More for the JSON file; dataclasses are written as objects."""


def benchmark(function: Callable[..., Sequence[Figure] | Outcome]) -> click.Command:
    """A command that prints the machine, runs `function`, prints its figures beside their limits and, with --json FILE,
    writes all of that. Its exit status is 1 where a figure is missed, or where there is none."""

    @with_options
    @functools.wraps(function)
    def command(json_file: Path | None, **options: Any) -> None:
        machine = describe()
        click.echo(machine)
        returned = function(**options)
        outcome = returned if isinstance(returned, Outcome) else Outcome(returned)
        figures = [asdict(figure) | {"holds": figure.holds} for figure in outcome.figures or ()]
        if json_file is not None:
            everything = {"machine": machine, "figures": figures, **outcome.details}
            json_file.write_text(json.dumps(everything, indent=1, default=asdict))
        if outcome.figures is not None:
            conclude(outcome.figures)

    command.params.append(click.Option(["--json", "json_file"], type=FILE, help="Write all figures into this file."))
    return command


def conclude(figures: Sequence[Figure]) -> None:
    """Print the table. Raises SystemExit with status 1 where a figure is missed, or where there is none."""
    click.echo(figures_table(figures))
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


# --- figures ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Summary:
    """All but `count` are in the unit of the values."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float


def summarise(values: Sequence[float]) -> Summary:
    """Raises ValueError for an empty list: a figure made of nothing would look like a measurement."""
    if not values:
        raise ValueError("no values to summarise")
    ordered = sorted(values)
    p50, p95, p99 = (percentile(ordered, share) for share in (50, 95, 99))
    return Summary(len(ordered), math.fsum(ordered) / len(ordered), p50, p95, p99, ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest rank: the smallest value that `share` percent of the sorted values do not exceed."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Figure:
    """Holds while `measured` is at most `limit`, or at least `limit` where `at_least`."""

    name: str
    measured: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def holds(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def figures_table(figures: Sequence[Figure]) -> str:
    """One line per figure, at most 100 wide where names are at most 48."""
    lines = [f"{'figure':<48}{'measured':>14}{'limit':>16}  verdict"]
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        limit = f"{sign} {_number(figure.limit, figure.unit)}"
        verdict = "holds" if figure.holds else "MISSED"
        lines.append(f"{figure.name:<48}{_number(figure.measured, figure.unit):>14}{limit:>16}  {verdict}")
    return "\n".join(lines)


def table_row(title: str, cells: Iterable[object], title_width: int, width: int) -> str:
    """One line of a table: its title to the left, then cells of one width to the right."""
    return f"{title:<{title_width}}" + "".join(f"{cell:>{width}}" for cell in cells)


def _number(value: float, unit: str) -> str:
    text = f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"
    return f"{text} {unit}".rstrip()


# --- options ----------------------------------------------------------------------------------------------------------


def with_options(function: Callable[..., Any]) -> click.Command:
    """A command whose options are the parameters of `function`, each with its name, type and default.

    In `Annotated` a text is the help, one that begins with `--` the option's name, and a type of click its type. Counts
    are at least 1 where no type is named; tuples are repeatable. Options that decorators of click declare stay.
    """
    hints = get_type_hints(inspect.unwrap(function), include_extras=True)
    declared: list[click.Parameter] = list(reversed(getattr(function, "__click_params__", [])))
    names = {option.name for option in declared}
    options = [
        _option(parameter, hints[name])
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in names and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return click.Command(
        function.__name__.replace("_", "-"),
        callback=function,
        params=[*options, *declared],
        help=inspect.getdoc(function),
    )


def _option(parameter: inspect.Parameter, hint: Any) -> click.Option:
    metadata: tuple[Any, ...] = getattr(hint, "__metadata__", ())
    plain = get_args(hint)[0] if metadata else hint
    [kind] = {argument for argument in get_args(plain) if argument not in (type(None), ...)} or {plain}
    name = f"--{parameter.name.replace('_', '-')}"
    settings: dict[str, Any] = {"type": click.IntRange(1) if kind is int else kind, "show_default": True}
    for annotation in metadata:
        if isinstance(annotation, dict):
            settings |= annotation
        elif not isinstance(annotation, str):
            settings["type"] = annotation
        elif annotation.startswith("--"):
            name = annotation
        else:
            settings["help"] = annotation
    if parameter.default is inspect.Parameter.empty:
        settings |= {"required": True, "show_default": False}
    else:
        settings["default"] = parameter.default
    if kind is bool:
        del settings["type"]
        settings |= {"is_flag": True, "show_default": parameter.default}
        name += f"/--no-{name[2:]}" if parameter.default else ""
    if getattr(plain, "__origin__", None) is tuple:
        settings["multiple"] = True
    return click.Option([name, parameter.name], **settings)


Shape = Annotated[str, click.Choice(list(SHAPES)), "A random model."]
ShapeOrDemo = Annotated[str | None, click.Choice(list(SHAPES)), "A random model [default: the demonstration model]."]
Quant = Annotated[str | None, click.Choice(QUANTS), "Pack the weights."]
ThreadCount = Annotated[int | None, "CPU threads [default: torch's choice]."]
ModelsFolder = Annotated[Path | None, FOLDER, "--models", "Keep the random models here, or take them."]


@contextmanager
def models_of(shape: str, folder: Path | None = None, dtype: str = "float32") -> Generator[Models]:
    """The files of a random model in `folder`, or in one that is deleted afterwards."""
    with TemporaryDirectory(prefix="furrow-bench-") as scratch:
        yield Models(shape, folder or Path(scratch), dtype)


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
