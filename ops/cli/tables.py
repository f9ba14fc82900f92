"""Tables on standard output."""

from __future__ import annotations

from collections.abc import Sequence

import click


def echo_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of equally many cells, the first one being the header, in columns two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
