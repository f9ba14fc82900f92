"""A benchmark as a program: what it prints, writes and returns as its exit status."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
import pytest
from click.testing import CliRunner

from ops.harness.program import Figure, Outcome, benchmark


@dataclass
class Detail:
    name: str
    seconds: float


@benchmark
def some_bench(
    steps: int = 3,
    rate: Annotated[float, "Of each."] = 0.0,
    counts: Annotated[tuple[int, ...], "--rows"] = (1, 8),
) -> Outcome:
    """Measure something."""
    click.echo(f"{steps} {rate} {counts}")
    return Outcome([Figure("time", steps, 3, "s")], {"details": [Detail("one", 1.5)]})


@benchmark
def without_limits() -> Outcome:
    return Outcome(details={"files": 3})


@benchmark
def without_figures() -> list[Figure]:
    return []


def test_the_machine_and_the_table_are_printed_and_all_figures_are_written(tmp_path: Path) -> None:
    """Dataclasses among the details become objects."""
    result = CliRunner().invoke(some_bench, ["--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    machine, options, *table = result.output.splitlines()
    assert machine.startswith("machine: ") and options == "3 0.0 (1, 8)"
    assert table[-1].split() == ["time", "3", "s", "<=", "3", "s", "holds"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["machine"].partition("load")[0] == machine.partition("load")[0]
    figure = {"name": "time", "measured": 3, "limit": 3, "unit": "s", "at_least": False, "holds": True}
    assert written["figures"] == [figure]
    assert written["details"] == [{"name": "one", "seconds": 1.5}]


def test_a_missed_figure_is_the_exit_status_and_is_written_all_the_same(tmp_path: Path) -> None:
    result = CliRunner().invoke(some_bench, ["--steps", "4", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 1 and "MISSED" in result.output
    assert json.loads((tmp_path / "out.json").read_text())["figures"][0]["holds"] is False


@pytest.mark.parametrize(("command", "status"), [(without_limits, 0), (without_figures, 1)])
def test_no_figures_fail_unless_there_are_no_limits(command: click.Command, status: int) -> None:
    assert CliRunner().invoke(command, []).exit_code == status


def test_counts_are_at_least_one_and_other_numbers_are_free() -> None:
    """`--rate 0` is a number, `--steps 0` no count."""
    assert some_bench.name == "some-bench"
    assert CliRunner().invoke(some_bench, ["--rate", "0"]).exit_code == 0
    assert CliRunner().invoke(some_bench, ["--steps", "0"]).exit_code == 2
