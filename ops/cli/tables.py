"""Tables and JSON on standard output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def echo_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of equally many cells, the first one being the header, in columns two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def echo_json(data: Any) -> None:
    """Data with msgspec's or plain types, indented."""
    click.echo(msgspec.json.format(msgspec.json.encode(data), indent=2))


def duration(ms: float) -> str:
    """Milliseconds as people read them: 340 ms, 12.3 s, 4 min, 2 h.

    >>> duration(12_340)
    '12.3 s'
    """
    if ms < 1_000:
        return f"{ms:.0f} ms"
    if ms < 60_000:
        return f"{ms / 1_000:.1f} s"
    return f"{ms / 60_000:.0f} min" if ms < 7_200_000 else f"{ms / 3_600_000:.0f} h"
