"""Figures that must hold: what was measured beside its limit, as a table, and the exit status that says whether."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click


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


def table(figures: Sequence[Figure]) -> str:
    """One line per figure, at most 100 wide where names are at most 48."""
    lines = [f"{'figure':<48}{'measured':>14}{'limit':>16}  verdict"]
    for figure in figures:
        sign = ">=" if figure.at_least else "<="
        limit = f"{sign} {_number(figure.limit, figure.unit)}"
        verdict = "holds" if figure.holds else "MISSED"
        lines.append(f"{figure.name:<48}{_number(figure.measured, figure.unit):>14}{limit:>16}  {verdict}")
    return "\n".join(lines)


def conclude(figures: Sequence[Figure]) -> None:
    """Print the table. Raises SystemExit with status 1 where a figure is missed, or where there is none."""
    click.echo(table(figures))
    if not figures or not all(figure.holds for figure in figures):
        raise SystemExit(1)


def _number(value: float, unit: str) -> str:
    text = f"{value:.0f}" if float(value).is_integer() else f"{value:.2f}"
    return f"{text} {unit}".rstrip()
