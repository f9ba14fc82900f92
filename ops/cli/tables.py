"""Tables and JSON on standard output, and text of others without control characters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, TextIO

import click
import msgspec

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")

_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def plain(text: str) -> str:
    """Text of a model, a repository or a server without control characters, which could move the cursor or change the
    terminal's state. Newlines and tabs stay.

    >>> plain("a\x1b[2Jb")
    'a[2Jb'
    """
    return text.translate(_CONTROLS)


def fit(text: str, file: TextIO | None = None) -> str:
    """`plain` where `file`, standard output by default, is a terminal; else the text as it is."""
    return plain(text) if (file or sys.stdout).isatty() else text


def echo_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows of equally many cells, the first one being the header, in columns two spaces apart."""
    rows = [[fit(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def echo_json(data: Any) -> None:
    """Data with msgspec's or plain types, indented. A list is an array of objects, [] where there is none, and all else
    an object; fields are those of GET /farm where that has the same."""
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
